"""Whether the library on disk is still the one that this notebook has loaded.

The server always runs the code on disk. A kernel that loaded an older version would speak another language
with it, so such a kernel is told to restart.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

LIBRARY = Path(__file__).parent


class StaleLibrary(RuntimeError):
    """The library changed on disk after this process had loaded it."""


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_loaded = {path.name: (_stamp(path), _content(path)) for path in LIBRARY.glob("*.py")}


def changed_modules() -> list[str]:
    """The library's modules that this process has loaded and that read differently on disk now."""
    changed = []
    for name, (stamp, content) in _loaded.items():
        path = LIBRARY / name
        if f"course_lib.{path.stem}" not in sys.modules:
            continue
        if not path.exists() or (_stamp(path) != stamp and _content(path) != content):
            changed.append(path.stem)
    return sorted(changed)


def check() -> None:
    """Raise StaleLibrary where this process has loaded an older version than the one on disk."""
    changed = changed_modules()
    if changed:
        raise StaleLibrary(
            f"course_lib changed on disk after this notebook had loaded it ({', '.join(changed)}). "
            "Restart the kernel (Kernel, Restart) and run the notebook again."
        )
