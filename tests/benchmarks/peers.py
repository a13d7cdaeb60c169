"""The launchers that ours is compared with: installed for the benchmark only, apart from the project."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build" / "peers"
PACKAGES = ("accelerate==1.15.0",)


def peers_python() -> Path:
    """A Python that has the peers and, from this environment, torch. Made on the first call."""
    python = PEERS / "bin" / "python"
    marker = PEERS / ".installed"
    if not marker.exists() or marker.read_text() != " ".join(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        ours = sysconfig.get_paths()["purelib"]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (PEERS / "lib" / version / "site-packages" / "ours.pth").write_text(f"{ours}\n{ROOT}\n")
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *PACKAGES],
            check=True,
        )
        marker.write_text(" ".join(PACKAGES))
    return python
