"""What a job gave: results, logs and spans by rank, what went wrong, and how it shows itself."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.spans import Span

LOG_LINES = 4
LINE_CHARACTERS = 110


class NoResult:
    """Stands for the result of a rank that gave none. False in a condition."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<rank {self.rank} gave no result: {self.reason}>"


class Logs(Sequence[str]):
    """What each rank printed, by rank. Shows itself side by side."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __getitem__(self, rank: Any) -> Any:
        return self._texts[rank]

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __repr__(self) -> str:
        printed = [text.rstrip() or "(printed nothing)" for text in self._texts]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(printed))


@dataclass
class Run:
    """What a job gave.

    results: what each rank returned, by rank (a NoResult where it returned nothing). logs: what each rank
    printed, C++ text included. spans: what happened when, in order of time. seconds: how long `launch` took,
    start to end. kind: "measured", or "paced" where links or compute were paced. failure: the exception that
    `launch` would have raised; None where all went well. warnings: what you should know before you believe
    the numbers. traffic: per rank, what each collective sent, in bytes and messages (jobs with a Pace only).
    """

    name: str
    nproc: int
    backend: str | None
    kind: str
    results: list[Any]
    logs: Logs
    spans: list[Span]
    seconds: float
    failure: BaseException | None = None
    warnings: list[str] = field(default_factory=list)
    traffic: list[dict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every rank returned."""
        return self.failure is None

    def explain(self, rank: int = 0) -> Any:
        """Where the time of one step went, and what to change first.

        Needs spans of at least one step: call `probe(model)` in the function. Raises ValueError without them.
        """
        from course_lib.explain import explain

        return explain(self, rank)

    def _headline(self) -> str:
        ranks = "1 rank" if self.nproc == 1 else f"{self.nproc} ranks"
        outcome = "" if self.ok else f", failed ({type(self.failure).__name__})"
        backend = f" over {self.backend}" if self.backend else ""
        return f"{self.name}: {ranks}{backend}, {self.seconds:.2f} s, {self.kind}{outcome}"

    def _first_lines(self, rank: int) -> list[str]:
        lines = [line for line in self.logs[rank].splitlines() if line.strip()]
        shown = [line[:LINE_CHARACTERS] for line in lines[:LOG_LINES]]
        if len(lines) > LOG_LINES:
            shown.append(f"… {len(lines) - LOG_LINES} more lines in run.logs[{rank}]")
        return shown

    def _result_text(self, rank: int) -> str:
        text = repr(self.results[rank]).replace("\n", " ")
        return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " …"

    def __repr__(self) -> str:
        lines = [self._headline()]
        for rank in range(self.nproc):
            lines.append(f"  rank {rank} returned {self._result_text(rank)}")
            lines += [f"    | {line}" for line in self._first_lines(rank)]
        lines += [f"  note: {warning}" for warning in self.warnings]
        if self.failure is not None:
            lines += ["", f"{type(self.failure).__name__}: {self.failure}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "style='text-align:left; vertical-align:top; padding:2px 12px 2px 0'"
        pre = "style='margin:0; white-space:pre-wrap; font-size:90%'"
        printed = any(text.strip() for text in self.logs)
        head = f"<tr><th {cell}>rank</th><th {cell}>returned</th>"
        head += (f"<th {cell}>printed</th>" if printed else "") + "</tr>"
        rows = []
        for rank in range(self.nproc):
            row = f"<td {cell}>{rank}</td><td {cell}><code>{html.escape(self._result_text(rank))}</code></td>"
            if printed:
                lines = html.escape("\n".join(self._first_lines(rank)))
                row += f"<td {cell}><pre {pre}>{lines}</pre></td>"
            rows.append(f"<tr>{row}</tr>")
        parts = [f"<div><b>{html.escape(self._headline())}</b></div><table>{head}{''.join(rows)}</table>"]
        parts += [f"<div><b>Note.</b> {html.escape(warning)}</div>" for warning in self.warnings]
        if self.failure is not None:
            text = html.escape(f"{type(self.failure).__name__}: {self.failure}")
            parts.append(f"<pre {pre}>{text}</pre>")
        return "".join(parts)
