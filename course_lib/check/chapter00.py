"""The exercise of chapter 00: a first look at how exercises work."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.check.lab import Lab
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import equals


def _picture() -> str:
    """Three ranks before and after, as SVG."""
    values = ((1.0, 4.0, 10.0), (5.0, 5.0, 5.0))
    colours = ("#0072B2", "#009E73", "#CC79A7")
    parts = []
    for column, (title, numbers) in enumerate(zip(("before", "after"), values, strict=True)):
        left = 80 + 220 * column
        parts.append(f"<text x='{left + 50}' y='18' text-anchor='middle' font-weight='bold'>{title}</text>")
        for rank, (number, colour) in enumerate(zip(numbers, colours, strict=True)):
            top = 30 + 34 * rank
            parts.append(
                f"<rect x='{left}' y='{top}' width='100' height='26' fill='{colour}'/>"
                f"<text x='{left + 50}' y='{top + 18}' text-anchor='middle' fill='white'>{number:g}</text>"
            )
            if column == 0:
                parts.append(f"<text x='70' y='{top + 18}' text-anchor='end'>rank {rank}</text>")
    parts.append("<text x='240' y='82' text-anchor='middle' font-size='20'>→</text>")
    return (
        "<svg viewBox='0 0 420 140' width='420' height='140' font-family='sans-serif' font-size='13'>"
        + "<title>Before: ranks hold 1, 4 and 10. After: each holds 5.</title>"
        + "".join(parts)
        + "</svg>"
    )


@exercise(
    "0.1",
    "Average a value over the ranks",
    hints=(
        Hint(
            "Each rank knows only its own value",
            "A rank cannot see another rank's variables. `dist.all_reduce(tensor)` adds the tensors of all "
            "ranks, and leaves the sum in each of them, in place.",
            fits=("never synchronised", "its own input", "scaled, but never synchronised", "wrong type"),
        ),
        Hint(
            "The result is too large, or the input has changed",
            "`all_reduce` adds: divide by `dist.get_world_size()`. And it writes into the tensor that it is "
            "given: hand it a new one, such as `torch.tensor(value)`.",
            fits=("a sum, not a mean", "edits its input", "two ranks assumed"),
        ),
        Hint("What it should look like", "Three ranks, before and after.", picture=_picture),
    ),
)
def judge_average(lab: Lab, average: Callable) -> None:
    """The mean over ranks of one number each."""
    for nproc in (3, 2, 4):
        values = [float((rank + 1) ** 2 + 0.5 * nproc) for rank in range(nproc)]
        outcome = lab.call(average, [(value,) for value in values], nproc, tried=f"values {values}")
        mean = sum(values) / nproc
        halved = equals(
            "two ranks assumed",
            f"The sum is divided by 2, and there are {nproc} ranks. Ask `dist.get_world_size()`.",
            [mean * nproc / 2] * nproc,
        )
        lab.same(
            outcome,
            [mean] * nproc,
            what="the mean",
            local=values,
            signatures=[halved] if nproc != 2 else [],
        )
    lab.note("2, 3 and 4 ranks: each holds the mean of all")
