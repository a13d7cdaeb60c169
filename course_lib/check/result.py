"""How a check's outcome and a hint show themselves, in a notebook and as text."""

from __future__ import annotations

import base64
import html
import io
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from course_lib.check.registry import Hint

PASSED, NOT_YET, NOT_ATTEMPTED = "passed", "not yet", "not attempted"
_BORDERS = {PASSED: "#009E73", NOT_YET: "#D55E00", NOT_ATTEMPTED: "#999999"}
_LINES = 12


@dataclass
class Result:
    """What came of a check.

    outcome: "passed", "not yet" or "not attempted". diagnosis: the short name of what is wrong; empty unless
    not yet. message: what to tell the learner. tried, expected, got, rank: the facts behind it. details:
    the job's own report, where one failed. printed: what the ranks printed. hint: the hint that goes with it.
    """

    name: str
    title: str
    outcome: str
    message: str
    diagnosis: str = ""
    tried: str = ""
    expected: str = ""
    got: str = ""
    rank: int | None = None
    details: str = ""
    checked: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    hint: Hint | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.outcome == PASSED

    def _facts(self) -> list[tuple[str, str]]:
        where = f"rank {self.rank}" if self.rank is not None else ""
        pairs = [("tried", self.tried), ("expected", self.expected), ("got", self.got), ("where", where)]
        return [(name, text) for name, text in pairs if text]

    def _headline(self) -> str:
        word = {PASSED: "Passed", NOT_YET: "Not yet", NOT_ATTEMPTED: "Not attempted"}[self.outcome]
        return f"{word}: {self.name} {self.title}"

    def __repr__(self) -> str:
        lines = [self._headline(), *_wrapped(self.message)]
        lines += [f"  {name + ':':<10}{text}" for name, text in self._facts()]
        lines += [f"  - {line}" for line in self.checked]
        if self.details:
            lines += ["", textwrap.indent(self.details.rstrip(), "  | ", lambda _: True)]
        for line in self.printed:
            lines.append(f"  {line}")
        if self.hint is not None:
            lines += _wrapped(f"Hint. {self.hint.title}: {self.hint.text}")
        lines += _wrapped(self._more()) if self._more() else []
        return "\n".join(lines)

    def _more(self) -> str:
        return f'`check.hint("{self.name}")` gives the next hint.' if self.hint is not None else ""

    def _repr_html_(self) -> str:
        parts = [f"<div><b>{html.escape(self._headline())}</b></div>", f"<div>{marked(self.message)}</div>"]
        if self._facts():
            cell = "style='text-align:left; vertical-align:top; padding:1px 12px 1px 0'"
            rows = "".join(
                f"<tr><td {cell}>{name}</td><td {cell}>{marked(text)}</td></tr>"
                for name, text in self._facts()
            )
            parts.append(f"<table>{rows}</table>")
        if self.checked:
            parts.append("<ul>" + "".join(f"<li>{marked(line)}</li>" for line in self.checked) + "</ul>")
        for text in (self.details, "\n".join(self.printed)):
            if text:
                parts.append(f"<pre style='white-space:pre-wrap; font-size:90%'>{html.escape(text)}</pre>")
        if self.hint is not None:
            parts.append(
                f"<div><i>Hint.</i> <b>{marked(self.hint.title)}.</b> {marked(self.hint.text)}</div>"
            )
            parts.append(f"<div>{marked(self._more())}</div>")
        return boxed("".join(parts), _BORDERS[self.outcome])


class ShownHint:
    """A hint as `check.hint` gives it: which of how many, its text, and its picture where it has one."""

    def __init__(self, name: str, number: int, of: int, hint: Hint, more: str) -> None:
        self.name, self.number, self.of, self.hint, self.more = name, number, of, hint, more
        self.picture = hint.picture() if hint.picture is not None else None
        self._html = _picture_html(self.picture) if self.picture is not None else ""

    def _headline(self) -> str:
        return f"Hint {self.number} of {self.of} for {self.name}: {self.hint.title}"

    def __repr__(self) -> str:
        picture = ["  (The notebook shows a picture here.)"] if self.picture is not None else []
        return "\n".join([self._headline(), *_wrapped(self.hint.text), *picture, *_wrapped(self.more)])

    def _repr_html_(self) -> str:
        return boxed(
            f"<div><b>{marked(self._headline())}</b></div><div>{marked(self.hint.text)}</div>"
            f"{self._html}<div>{marked(self.more)}</div>",
            "#0072B2",
        )


def _picture_html(picture: Any) -> str:
    """A figure, axes, SVG or HTML, as HTML that needs nothing else."""
    if isinstance(picture, str):
        return picture
    if hasattr(picture, "_repr_html_"):
        return picture._repr_html_()
    from matplotlib import pyplot

    figure = picture.get_figure(root=True) if hasattr(picture, "get_figure") else picture
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img style='max-width:100%' alt='what it should look like' src='data:image/png;base64,{data}'>"


def marked(text: str) -> str:
    """`text` for a page: escaped, and with what stands between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def boxed(content: str, colour: str) -> str:
    """Content beside a coloured bar."""
    return (
        f"<div style='border-left:4px solid {colour}; padding:4px 0 4px 12px; margin:4px 0'>{content}</div>"
    )


def printed_lines(logs: Any) -> list[str]:
    """The first lines that each rank printed."""
    lines = []
    for rank, text in enumerate(logs):
        own = [line for line in text.splitlines() if line.strip()]
        lines += [f"rank {rank} printed: {line[:110]}" for line in own[:_LINES]]
        if len(own) > _LINES:
            lines.append(f"rank {rank} printed {len(own) - _LINES} more lines")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ") if text else []
