"""Exercise 1.1: scatter and gather with an uneven last batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from course_lib.check import chapter01_ranks as ranks
from course_lib.check.lab import Lab, NotYet
from course_lib.check.registry import Hint, exercise
from course_lib.dp_ledger import parts_of


def _scatter_picture() -> str:
    """13 rows on four devices, as SVG."""
    colours, parts, x = ("#0072B2", "#009E73", "#CC79A7", "#999933"), [], 10
    for device, rows in enumerate(parts_of(13, 4)):
        for _ in range(rows):
            parts.append(f"<rect x='{x}' y='26' width='22' height='26' fill='{colours[device]}'/>")
            x += 24
        middle = x - 24 * rows / 2 - 1
        label = f"device {device}: {rows}" if rows > 1 else f"{device}: {rows}"
        parts.append(f"<text x='{middle}' y='70' text-anchor='middle'>{label}</text>")
        x += 14
    return (
        "<svg viewBox='0 0 400 80' width='400' height='80' font-family='sans-serif' font-size='12'>"
        "<title>13 rows on 4 devices: 4, 4, 4 and 1</title>"
        "<text x='10' y='16'>13 rows, ceil(13 / 4) = 4 each, the last gets what is left</text>"
        f"{''.join(parts)}</svg>"
    )


SCATTER_CASES = ((15, 4), (13, 4), (12, 4), (5, 4), (3, 8), (1, 2), (7, 1))


@exercise(
    "1.1",
    "Scatter and gather with an uneven last batch",
    hints=(
        Hint(
            "Some rows get lost, or come in another order",
            "Each device gets `ceil(rows / devices)` neighbouring rows, and the last one what is left. "
            "`range(0, rows, each)` gives the first row of each part.",
            fits=("drops rows", "interleaved", "repeats rows", "the whole batch for everyone", "wrong type"),
        ),
        Hint(
            "It works for 12 rows on 4 devices, and not for 5 or 3",
            "With 5 rows on 4 devices each gets 2: the third gets 1, and the fourth nothing at all. Return "
            "fewer parts than there are devices rather than empty ones.",
            fits=("empty parts", "another cut", "the last part is too large"),
        ),
        Hint("What it should look like", "13 rows on four devices.", picture=_scatter_picture),
    ),
)
def judge_scatter_and_gather(lab: Lab, scatter: Callable, gather: Callable) -> None:
    """Parts as nn.DataParallel cuts them, and outputs in the order of the batch."""
    for rows, devices in SCATTER_CASES:
        batch = ranks.batch_of(rows)
        tried = ranks.case(rows, devices)
        outcome = lab.call((scatter, gather), (batch, devices), 1, via=ranks.scatter_and_gather, tried=tried)
        _judge_parts(lab, outcome.results[0]["parts"], batch, devices)
        gathered, expected = outcome.results[0]["gathered"], ranks.outputs_of(batch)
        if isinstance(gathered, Tensor) and gathered.shape != expected.shape and rows > 1:
            lab.require(
                gathered.dim() != expected.dim() + 1,
                "stacked",
                "The outputs were stacked: that makes a new dimension. The rows are to follow one another, "
                "as in the batch.",
                expected=f"shape {tuple(expected.shape)}",
                got=f"shape {tuple(gathered.shape)}",
            )
        lab.same([gathered], [expected], what="the gathered outputs")
    lab.note(", ".join(ranks.case(rows, devices) for rows, devices in SCATTER_CASES))


def _judge_parts(lab: Lab, parts: Any, batch: Mapping[str, Tensor], devices: int) -> None:
    """Raise NotYet unless the parts are those that `Tensor.chunk` makes."""
    rows = len(batch["images"])
    wanted = parts_of(rows, devices)
    if not isinstance(parts, (list, tuple)) or not all(
        isinstance(part, dict)
        and list(part) == list(batch)
        and all(isinstance(t, Tensor) and t.dim() == batch[name].dim() for name, t in part.items())
        for part in parts
    ):
        raise NotYet(
            "wrong type",
            "`scatter` is to return a list with a dict for each part, with the batch's names and a tensor "
            "for each of them.",
            tried=lab.last.tried if lab.last else "",
            got=type(parts).__name__,
        )
    sizes = tuple(len(part["images"]) for part in parts)
    facts: dict[str, Any] = {
        "expected": f"parts of {list(wanted)} rows",
        "got": f"parts of {list(sizes)} rows",
    }
    lab.require(
        all(len(tensor) == size for part, size in zip(parts, sizes, strict=True) for tensor in part.values()),
        "cut differently",
        "In one part, images and labels have different numbers of rows. Cut all tensors alike.",
        **facts,
    )
    lab.require(
        devices == 1 or len(parts) == 1 or sizes != (rows,) * devices,
        "the whole batch for everyone",
        "Every device got the whole batch: then each computes everything.",
        **facts,
    )
    lab.require(
        all(sizes), "empty parts", "Some parts have no rows. A device without rows is left out.", **facts
    )
    lab.require(
        sum(sizes) >= rows,
        "drops rows",
        f"Of {rows} rows only {sum(sizes)} arrive. `rows // devices` rounds down: what is left over?",
        **facts,
    )
    lab.require(
        sum(sizes) <= rows,
        "repeats rows",
        f"The parts have {sum(sizes)} rows, and the batch {rows}: some rows count twice, or are padding.",
        **facts,
    )
    together = torch.cat([part["images"] for part in parts])
    if not torch.equal(together, batch["images"]):
        same_rows = torch.equal(together.sort(0).values, batch["images"].sort(0).values)
        lab.require(
            not same_rows,
            "interleaved",
            "All rows are there, in another order. Each device is to get neighbouring rows: then the "
            "gathered outputs stand in the order of the targets.",
        )
    joined = {name: torch.cat([part[name] for part in parts]) for name in batch}
    lab.same([joined], [dict(batch)], what="the rows of all parts")
    lab.require(
        sizes == wanted,
        "the last part is too large" if sizes[-1] > wanted[0] else "another cut",
        "No device may get more than `ceil(rows / devices)` rows: the slowest decides how long a step takes."
        if max(sizes) > wanted[0]
        else "The parts differ from those of `nn.DataParallel`: `ceil(rows / devices)` rows each, and the "
        "last part what is left.",
        **facts,
    )
