"""What wrong values give away: each known mistake by its signature, with a name and a word on the cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.check.compare import vector

CLOSE_RTOL, CLOSE_ATOL = 1e-4, 1e-7
NEARLY = 2e-2


@dataclass
class Evidence:
    """What is known about wrong values; each a list by rank of float64 vectors.

    local: what each rank holds before anything is communicated; inputs: what it was given. None where the
    exercise has nothing of the kind.
    """

    got: list[Tensor]
    expected: list[Tensor]
    local: list[Tensor] | None = None
    inputs: list[Tensor] | None = None

    @property
    def nproc(self) -> int:
        return len(self.got)

    def is_(self, wanted: Sequence[Tensor] | None) -> bool:
        """Whether the values are these, on every rank."""
        return wanted is not None and all(map(close, self.got, wanted))

    def times(self, factor: float) -> list[Tensor]:
        """The expected values, multiplied."""
        return [value * factor for value in self.expected]

    @property
    def alike(self) -> bool:
        """Whether all ranks are expected to hold the same."""
        return all(close(value, self.expected[0]) for value in self.expected)

    @property
    def right(self) -> list[int]:
        """The ranks whose values are as expected."""
        return [rank for rank in range(self.nproc) if close(self.got[rank], self.expected[rank])]


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors are equal but for rounding."""
    if a.shape != b.shape:
        return False
    scale = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=CLOSE_RTOL, atol=max(CLOSE_ATOL, 1e-6) * scale)


@dataclass(frozen=True)
class Signature:
    """A mistake: its name, and a function that says what to tell the learner where it recognises it."""

    key: str
    recognise: Callable[[Evidence], str | None]


def equals(key: str, says: str, values: Sequence[Any]) -> Signature:
    """The mistake that gives exactly these values, by rank. For mistakes that only one exercise knows."""
    wanted = [vector(value) for value in values]

    def recognise(evidence: Evidence) -> str | None:
        if len(wanted) != evidence.nproc or any(value is None for value in wanted):
            return None
        return says if evidence.is_(wanted) else None  # type: ignore[arg-type]

    return Signature(key, recognise)


LIBRARY: list[Signature] = []


def _known(key: str) -> Callable[[Callable[[Evidence], str | None]], Callable]:
    def register(recognise: Callable[[Evidence], str | None]) -> Callable:
        LIBRARY.append(Signature(key, recognise))
        return recognise

    return register


@_known("not a number")
def _not_a_number(e: Evidence) -> str | None:
    bad = [r for r in range(e.nproc) if not torch.isfinite(e.got[r]).all()]
    if bad and all(torch.isfinite(value).all() for value in e.expected):
        return (
            f"There is an infinity or a NaN on ranks {bad}. "
            "Memory from `torch.empty` that nobody filled? A division by zero?"
        )
    return None


@_known("zeros")
def _zeros(e: Evidence) -> str | None:
    if all(value.numel() and not value.any() for value in e.got):
        return "Everything is zero: the result was prepared, but nothing was ever written into it."
    return None


@_known("never synchronised")
def _local(e: Evidence) -> str | None:
    if e.nproc > 1 and e.is_(e.local):
        return "Each rank still holds its own local values: nothing was exchanged, or the result was dropped."
    return None


@_known("scaled, but never synchronised")
def _local_scaled(e: Evidence) -> str | None:
    if e.nproc > 1 and e.local and e.is_([value / e.nproc for value in e.local]):
        return (
            f"Each rank holds its own values divided by {e.nproc}: the division is there, the sum over the "
            "ranks is not (or it had not arrived when the values were read)."
        )
    return None


@_known("its own input")
def _input(e: Evidence) -> str | None:
    return "This is the input, unchanged." if e.is_(e.inputs) else None


@_known("a sum, not a mean")
def _sum(e: Evidence) -> str | None:
    if e.nproc > 1 and e.is_(e.times(e.nproc)):
        return (
            f"The values are {e.nproc} times too large, on {e.nproc} ranks: this is the sum over the ranks, "
            "and a mean is asked for. `all_reduce` adds; somebody has to divide by the number of ranks. (A "
            "loss that is multiplied by it looks the same.)"
        )
    return None


@_known("averaged twice")
def _twice(e: Evidence) -> str | None:
    if e.nproc > 1 and e.is_(e.times(1 / e.nproc)):
        return (
            f"The values are {e.nproc} times too small, on {e.nproc} ranks: divided by the number of ranks "
            "once too often. Is the loss, or the gradient before it was sent, divided too?"
        )
    return None


@_known("added twice")
def _added_twice(e: Evidence) -> str | None:
    if e.nproc > 1 and e.is_(e.times(e.nproc**2)):
        return f"The values are {e.nproc}² times too large: summed over the ranks twice, and never divided."
    return None


@_known("one rank's value everywhere")
def _one_ranks(e: Evidence) -> str | None:
    if e.nproc == 1 or not e.local:
        return None
    for rank, value in enumerate(e.local):
        if e.is_([value] * e.nproc):
            return (
                f"All ranks hold rank {rank}'s local values: that is a broadcast. "
                "The other ranks' values never counted."
            )
    return None


@_known("one share is missing")
def _missing(e: Evidence) -> str | None:
    if e.nproc < 3 or not e.local or not e.alike or any(v.shape != e.got[0].shape for v in e.local):
        return None
    total = torch.stack(e.local).sum(0)
    for divisor in {1, e.nproc, e.nproc - 1}:
        if e.is_([(total - own) / divisor for own in e.local]):
            return "Each rank has the others' values, and left out its own."
        for rank, value in enumerate(e.local):
            if e.is_([(total - value) / divisor] * e.nproc):
                return f"Rank {rank}'s share is missing from the result."
    return None


@_known("the wrong sign")
def _sign(e: Evidence) -> str | None:
    return "The numbers are right, with the wrong sign." if e.is_(e.times(-1)) else None


@_known("another rank's part")
def _shifted(e: Evidence) -> str | None:
    if e.nproc == 1 or e.alike:
        return None
    for shift in range(1, e.nproc):
        if e.is_([e.expected[(rank + shift) % e.nproc] for rank in range(e.nproc)]):
            return (
                f"The values are right, but on the wrong ranks: rank 0 holds what rank {shift} should hold, "
                "and so on around. Count again which part is whose at the end."
            )
    return None


@_known("all ranks the same")
def _same(e: Evidence) -> str | None:
    if e.nproc > 1 and not e.alike and all(close(value, e.got[0]) for value in e.got):
        return "All ranks hold the same, and each should hold something of its own. Is the rank used at all?"
    return None


@_known("only one rank is right")
def _only_one(e: Evidence) -> str | None:
    if e.nproc > 1 and len(e.right) == 1:
        rank = e.right[0]
        return (
            f"Only rank {rank} holds the right values. A `reduce` or `gather` gives them to one rank; "
            "the others need them too."
        )
    return None


@_known("the remainder is lost")
def _remainder(e: Evidence) -> str | None:
    size = e.expected[0].numel()
    rest = size % e.nproc if e.nproc else 0
    if rest == 0 or rest == size or not e.alike or any(value.numel() != size for value in e.got):
        return None
    whole = size - rest
    if all(close(g[:whole], x[:whole]) for g, x in zip(e.got, e.expected, strict=True)):
        return (
            f"All but the last {rest} of {size} values are right: {size} does not divide by {e.nproc}, "
            "and the remainder was left behind."
        )
    return None


@_known("the wrong order")
def _order(e: Evidence) -> str | None:
    for got, expected in zip(e.got, e.expected, strict=True):
        if got.shape != expected.shape or not close(got.sort().values, expected.sort().values):
            return None
    size = e.got[0].numel()
    for turn in range(1, e.nproc):
        by = turn * size // e.nproc
        if size % e.nproc == 0 and e.is_([value.roll(by) for value in e.expected]):
            return f"The right values in the wrong order: turned by {turn} of {e.nproc} chunks."
    if e.is_([value.flip(0) for value in e.expected]):
        return "The right values, back to front."
    return "The right values are all there, in the wrong order."


@_known("off by a factor")
def _factor(e: Evidence) -> str | None:
    base = e.expected[0]
    if not base.numel() or not base.any() or e.got[0].shape != base.shape:
        return None
    place = int(base.abs().argmax())
    factor = float(e.got[0][place] / base[place])
    if factor and e.is_(e.times(factor)):
        return f"Every value is {factor:.4g} times what it should be."
    return None


@_known("the ranks differ")
def _differ(e: Evidence) -> str | None:
    if e.nproc > 1 and e.alike and not all(close(value, e.got[0]) for value in e.got):
        same_shape = all(value.shape == e.got[0].shape for value in e.got)
        if same_shape and close(torch.stack(e.got).mean(0), e.expected[0]):
            return (
                "The ranks hold different values. Their mean would be right, so each has its own part: "
                "an all-reduce is missing."
            )
        return "The ranks hold different values. A broadcast or an all-reduce is missing, or too late."
    return None


@_known("nearly right")
def _nearly(e: Evidence) -> str | None:
    for got, expected in zip(e.got, e.expected, strict=True):
        if got.shape != expected.shape or not expected.numel():
            return None
        if (got - expected).abs().max() > NEARLY * expected.abs().max():
            return None
    return (
        "The values are close, but not equal: something rounds (a lower precision?), or a small part is off."
    )


def recognise(evidence: Evidence, own: Sequence[Signature] = ()) -> tuple[str, str] | None:
    """The first signature that fits, as (diagnosis, what to say): the exercise's own first."""
    for signature in [*own, *LIBRARY]:
        says = signature.recognise(evidence)
        if says:
            return signature.key, says
    return None
