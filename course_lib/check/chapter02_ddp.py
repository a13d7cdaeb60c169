"""Exercise 2.3: a DDP by hand that gives what one process on the whole batch gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.check.lab import Lab, NotYet, Outcome
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import Signature, equals
from course_lib.pace import Pace

STEPS, ROWS, WIDTH = 5, 24, 6
State = dict[str, Tensor]


def awkward(seed: int) -> nn.Sequential:
    """A model with a tied weight and a frozen bias, in float64."""
    torch.manual_seed(seed)
    first, second, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: the same rows, shuffled anew."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
    return inputs[order], targets[order]


def train(wrap: Callable, average: Callable, seed: int, part: int, parts: int) -> State:
    """Five steps on this part of each batch; what the model's weights are then."""
    model = awkward(seed)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (whole.chunk(parts)[part] for whole in batch(step))
        optimizer.zero_grad()
        mse_loss(wrapped(inputs), targets).backward()
        average(wrapped)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def on_a_rank(ddp: Callable) -> State:
    """In a rank: train with the learner's class. Each rank's model starts from a seed of its own."""
    rank = dist.get_rank()
    return train(ddp, lambda wrapped: wrapped.average_gradients(), rank, rank, dist.get_world_size())


def _picture() -> str:
    """Everyone's gradients added up, on every rank."""
    from course_lib.collective_picture import promise

    return promise("all_reduce", 4)._repr_html_()


@exercise(
    "2.3",
    "A DDP by hand",
    hints=(
        Hint(
            "The ranks end with different weights",
            "They start alike only if one of them says how, in `__init__`; and stay alike only if all take "
            "the same step, so every gradient has to be the same everywhere.",
            fits=(
                "no broadcast at the start",
                "never synchronised",
                "some gradients left out",
                "the first step only",
                "another start",
            ),
        ),
        Hint(
            "The ranks agree, but are wrong; or one of them fails",
            "`all_reduce` adds: divide by `dist.get_world_size()`, once. A frozen parameter has no gradient: "
            "its `.grad` is None. A tied weight is one parameter with two names.",
            fits=(
                "a sum, not a mean",
                "two ranks assumed",
                "divided twice",
                "frozen parameters have no gradient",
                "no gradient arrives",
                "sent twice",
                "nothing is divided between ranks",
            ),
        ),
        Hint("What it should look like", "Every rank has the sum; then divide.", picture=_picture),
    ),
)
def judge_naive_ddp(lab: Lab, NaiveDDP: Callable) -> None:
    """Five steps give the weights of one process on the whole batch; then the bytes of a step."""
    whole = train(lambda model: model, lambda model: None, 0, 0, 1)
    for nproc in (3, 2, 4):
        outcome = _trained(lab, NaiveDDP, nproc)
        lab.same(
            outcome,
            [whole] * nproc,
            what="the weights after five steps",
            signatures=_mistakes(nproc),
            rtol=1e-9,
            atol=1e-11,
        )
        lab.note(f"{nproc} ranks: the weights of one process after {STEPS} steps, to 1e-9")
    counted = _trained(lab, NaiveDDP, 3, pace=Pace())
    once = STEPS * sum(p.nbytes for p in awkward(0).parameters() if p.requires_grad)
    sent = counted.payload_bytes("all_reduce")[0]
    lab.require(
        sent <= once,
        "sent twice",
        "More travels in a step than there are gradients. A tied weight has one gradient; a frozen one none.",
        expected=f"{once:,} bytes in {STEPS} steps",
        got=f"{sent:,} bytes",
    )
    lab.note(f"{STEPS} steps send {sent:,} bytes of gradients, and not one more" if sent == once else
             f"{STEPS} steps hand {sent:,} bytes to all_reduce")  # fmt: skip


def _trained(lab: Lab, ddp: Callable, nproc: int, pace: Pace | None = None) -> Outcome:
    tried = f"{STEPS} steps" + (", counting" if pace else "")
    try:
        return lab.call(ddp, (), nproc, via=on_a_rank, may_edit=True, pace=pace, tried=tried)
    except NotYet as found:
        if found.diagnosis == "an error" and "NoneType" in found.details:
            found.diagnosis = "frozen parameters have no gradient"
            found.says = "One bias is frozen, so its `.grad` is None. Leave such parameters out."
        raise


def _mistakes(nproc: int) -> list[Signature]:
    """What the usual mistakes give, each played in one process."""
    n = nproc
    local = [train(lambda model: model, lambda model: None, 0, rank, n) for rank in range(n)]
    frozen_start = awkward(0).state_dict()
    known = [
        equals(
            "a sum, not a mean",
            f"Every gradient is {n} times too large on {n} ranks: added up, but not divided.",
            [_scaled(float(n))] * n,
        ),
        equals(
            "divided twice",
            f"Every gradient is {n} times too small on {n} ranks: divided once too often.",
            [_scaled(1 / n)] * n,
        ),
        equals(
            "never synchronised",
            "The ranks start alike, but each has trained on its own rows alone: gradients were not averaged "
            "before the optimizer's step.",
            local,
        ),
        equals(
            "never synchronised",
            "Nothing was exchanged at all: each rank trained a model of its own.",
            [train(lambda model: model, lambda model: None, rank, rank, n) for rank in range(n)],
        ),
        equals(
            "no broadcast at the start",
            "The gradients are averaged, but each rank started from weights of its own, and so they never "
            "become alike.",
            _together(n, range(n)),
        ),
        equals(
            "another start",
            f"The ranks agree, but started from rank {n - 1}'s weights. Rank 0's are asked for.",
            [_whole(n - 1)] * n,
        ),
        equals(
            "no gradient arrives",
            "The weights are those of the start: the gradients were lost, or zeroed, or a copy was trained.",
            [frozen_start] * n,
        ),
    ]
    if n != 2:
        known.append(
            equals(
                "two ranks assumed",
                f"The sum is divided by 2, and there are {n} ranks. Ask `dist.get_world_size()`.",
                [_scaled(n / 2)] * n,
            )
        )
    return known


def _whole(seed: int) -> State:
    """One process on the whole batch, from the weights of another seed."""
    return train(lambda model: model, lambda model: None, seed, 0, 1)


def _scaled(factor: float) -> State:
    """One process whose gradients are off by a factor."""

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    return train(lambda model: model, scale, 0, 0, 1)


def _together(n: int, seeds: range) -> list[State]:
    """Ranks that average gradients, played in one process, each from a seed of its own."""
    models = [awkward(seed) for seed in seeds]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        inputs, targets = batch(step)
        for rank, model in enumerate(models):
            model.zero_grad()
            mse_loss(model(inputs.chunk(n)[rank]), targets.chunk(n)[rank]).backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            grads = [parameter.grad for parameter in same if parameter.grad is not None]
            if grads:
                mean = torch.stack(grads).mean(0)
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
