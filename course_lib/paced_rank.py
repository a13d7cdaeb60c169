"""What all paced groups of one rank share: its link, its ledger and its view of the board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib import spans
from course_lib.board import Board
from course_lib.ledger import Ledger
from course_lib.link import Link


@dataclass
class PacedRank:
    """One rank's share. record_spans: whether each transfer is recorded as a span on the link's lane."""

    link: Link = field(default_factory=Link)
    ledger: Ledger = field(default_factory=Ledger)
    record_spans: bool = False
    rank: int = 0
    board: Board | None = None

    def record(
        self, name: str, start: float, end: float, payload: int, detail: str = "", step: int | None = None
    ) -> None:
        """Record a transfer's paced time, where that is wanted."""
        if self.record_spans:
            spans.record(spans.Span(self.rank, name, start, end, payload, spans.LINK, step, detail))


def total_bytes(tensors: Sequence[Any]) -> int:
    """The bytes of tensors, or of lists of tensors."""
    return sum(
        t.numel() * t.element_size() if isinstance(t, torch.Tensor) else total_bytes(t) for t in tensors
    )
