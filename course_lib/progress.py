"""One line that moves while a job runs, in a notebook or a terminal, and is gone when it ends."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

FIRST_SECONDS = 0.4
EVERY_SECONDS = 0.25
LINE_CHARACTERS = 160


class Progress:
    """Shows where a job is. Appears only when the job takes a while, and updates a few times a second."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._next = time.monotonic() + FIRST_SECONDS
        self._handle: Any = None
        self._terminal_width = 0
        self._notebook = enabled and _in_notebook()

    def due(self) -> bool:
        """Whether it is time to show something new."""
        return self._enabled and time.monotonic() >= self._next

    def show(self, headline: str, lines: list[str]) -> None:
        """Show `headline`, and under it one line a rank (notebooks only)."""
        self._next = time.monotonic() + EVERY_SECONDS
        if self._notebook:
            text = "\n".join([headline, *(line[:LINE_CHARACTERS] for line in lines)])
            data = {"text/html": f"<pre style='color:#666'>{html.escape(text)}</pre>", "text/plain": headline}
            from IPython.display import display

            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)
        elif sys.stderr.isatty():
            self._write(headline)

    def close(self) -> None:
        """Take the line away again."""
        if self._handle is not None:
            self._handle.update({"text/html": "", "text/plain": ""}, raw=True)
            self._handle = None
        if self._terminal_width:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._terminal_width) + ("" if text else "\r"))
        sys.stderr.flush()
        self._terminal_width = len(text)


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
