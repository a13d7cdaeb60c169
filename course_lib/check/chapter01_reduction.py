"""Exercise 1.3: a step of data parallel in which a reduction is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from course_lib.check import chapter01_ranks as ranks
from course_lib.check.lab import Lab
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import equals
from course_lib.dp_ledger import parts_of


def _reduction_picture() -> str:
    """Four devices' gradients, and their sum on device 0, as SVG."""
    colours, parts = ("#0072B2", "#009E73", "#CC79A7", "#999933"), []
    for device, (colour, size) in enumerate(zip(colours, (60, 40, 70, 20), strict=True)):
        y = 10 + 24 * device
        parts.append(f"<text x='62' y='{y + 13}' text-anchor='end'>device {device}</text>")
        parts.append(f"<rect x='70' y='{y}' width='{size}' height='18' fill='{colour}'/>")
    x = 230
    for colour, size in zip(colours, (60, 40, 70, 20), strict=True):
        parts.append(f"<rect x='{x}' y='46' width='{size}' height='18' fill='{colour}'/>")
        x += size
    return (
        "<svg viewBox='0 0 440 110' width='440' height='110' font-family='sans-serif' font-size='12'>"
        "<title>The gradient on device 0 is the sum of all devices' gradients</title>"
        f"{''.join(parts)}<text x='170' y='60'>add →</text>"
        "<text x='230' y='38'>device 0, in the end</text></svg>"
    )


@exercise(
    "1.3",
    "Find the missing reduction",
    hints=(
        Hint(
            "How do I see what is wrong?",
            "Compare `parameter.grad` after `broken_step` with that of one process on the whole batch, for "
            "1, 2 and 4 devices. Then compare it with the gradient of each replica. Which one is it?",
            fits=(
                "the last device's gradient",
                "device 0's gradient",
                "no gradient",
            ),
        ),
        Hint(
            "The direction is right, the size is not",
            "There is one loss, the mean over all rows, on device 0. Each replica's gradient is already its "
            "share of that: shares are added, and nothing is divided.",
            fits=("divided by the devices", "means of means", "added twice", "multiplied by the devices"),
        ),
        Hint("What it should look like", "Shares, and their sum.", picture=_reduction_picture),
    ),
)
def judge_reduction(lab: Lab, mended_step: Callable) -> None:
    """Gradients of one process on the whole batch, on 1 to 5 devices, with the batch really scattered."""
    for rows, devices in ((13, 4), (9, 3), (8, 2), (6, 1), (3, 5)):
        images, labels = ranks.small_digits(rows)
        tried = ranks.case(rows, devices)
        outcome = lab.call(mended_step, (images, labels, devices), 1, via=ranks.one_step, tried=tried)
        found = outcome.results[0]
        lab.require(
            found["model"],
            "the weights changed",
            "The model's parameters are no longer what they were. The step is to compute gradients only.",
        )
        lab.require(
            all(gradient is not None for gradient in found["gradients"].values()),
            "no gradient",
            "After the step, some of the model's own parameters have no `.grad`.",
            got=", ".join(name for name, gradient in found["gradients"].items() if gradient is None),
        )
        _judge_gradients(lab, found["gradients"], images, labels, devices)
        wanted = list(parts_of(rows, devices))
        lab.require(
            sorted(found["rows"], reverse=True) == wanted,
            "not data parallel",
            "The gradients are right, but the work was not shared: each device is to see its part, once.",
            expected=f"forward passes with {wanted} rows",
            got=f"{found['rows']} rows",
        )
        lab.note(f"{tried}: the gradients of one process, to 1e-10")


def _judge_gradients(lab: Lab, got: dict[str, Tensor], images: Tensor, labels: Tensor, devices: int) -> None:
    model = ranks.small_net()
    parts = images.chunk(devices)
    shares = [ranks.share(model, images, labels, devices, device) for device in range(len(parts))]
    expected = {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}
    n = len(parts)

    def scaled(factor: float) -> list[dict[str, Tensor]]:
        return [{name: value * factor for name, value in expected.items()}]

    means = [
        ranks.gradients(model, lambda m, p=part, t=target: cross_entropy(m(p), t))  # type: ignore[misc]
        for part, target in zip(parts, labels.chunk(devices), strict=True)
    ]
    mean_of_means = {name: torch.stack([mean[name] for mean in means]).mean(0) for name in expected}
    doubled = {name: expected[name] + shares[0][name] for name in expected}
    rest = {name: expected[name] - shares[0][name] for name in expected}
    known = [
        equals(
            "the last device's gradient",
            f"This is the gradient of device {n - 1} alone. It came last, and took the place of the others.",
            [shares[-1]],
        ),
        equals(
            "device 0's gradient",
            "This is device 0's own share. Those of the other devices never came.",
            [shares[0]],
        ),
        equals("device 0's share is missing", "All shares are there but device 0's own.", [rest]),
        equals("added twice", "Device 0's own share was added twice.", [doubled]),
        equals(
            "divided by the devices",
            f"{n} times too small, on {n} devices: the shares were averaged. The loss is a mean over all "
            "rows already; shares are added.",
            scaled(1 / n),
        ),
        equals("multiplied by the devices", f"{n} times too large, on {n} devices.", scaled(n)),
        equals(
            "means of means",
            "Each part has a loss of its own here, and their gradients are averaged. Parts have different "
            "numbers of rows, so a row in a small part counts for more.",
            [mean_of_means],
        ),
    ]
    lab.same(
        [got], [expected], what="the gradients", signatures=known if n > 1 else [], rtol=1e-10, atol=1e-12
    )
