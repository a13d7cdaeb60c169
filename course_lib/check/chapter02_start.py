"""Exercise 2.2: every rank starts from rank 0's model, buffers included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.check.lab import Lab
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import Signature, equals
from course_lib.pace import Pace

FROZEN = "first.bias"
COUNTED_WIDTH = 64
# What may travel besides: sizes, where an answer sends objects.
SLACK_BYTES = 4096


class Net(nn.Module):
    """A tied weight, a frozen bias, and a layer with buffers; all values depend on the seed."""

    def __init__(self, seed: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(-1, 1)
            buffers = dict(self.norm.named_buffers())
            buffers["running_mean"].uniform_(-1, 1)
            buffers["running_var"].uniform_(0.5, 2)
            buffers["num_batches_tracked"].fill_(3 * seed + 1)

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output, as wide as the input."""
        return self.norm(self.second(self.first(x).relu()))


def _picture() -> str:
    """Rank 0's data on every rank."""
    from course_lib.collective_picture import promise

    return promise("broadcast", 4)._repr_html_()


@exercise(
    "2.2",
    "Broadcast at the start",
    hints=(
        Hint(
            "What has to travel?",
            "All that the ranks would otherwise have of their own: every parameter, also a frozen one, and "
            "the buffers, such as BatchNorm's statistics. `model.parameters()` and `model.buffers()` list "
            "them.",
            fits=(
                "buffers forgotten",
                "frozen parameters forgotten",
                "never synchronised",
                "parameters forgotten",
            ),
        ),
        Hint(
            "The ranks agree, but not on rank 0's model; or they hang; or too much is sent",
            "All ranks make the same calls, with the same root: `dist.broadcast(tensor, src=0)`. "
            "`state_dict()` lists a tied weight under each of its names, `parameters()` once. Write into the "
            "tensors that are there: an optimizer may already know them.",
            fits=("averaged", "another root", "deadlock", "sent twice", "new parameters", "an error"),
        ),
        Hint("What it should look like", "Four ranks, before and after.", picture=_picture),
    ),
)
def judge_synchronise(lab: Lab, synchronise: Callable) -> None:
    """Rank 0's parameters and buffers everywhere, in place, each of them sent once."""
    for nproc in (3, 2, 4):
        outcome = lab.call(synchronise, (6,), nproc, via=start, may_edit=True, tried="seeds differ by rank")
        states = [Net(rank).state_dict() for rank in range(nproc)]
        lab.same(
            [result["state"] for result in outcome.results],
            [states[0]] * nproc,
            what="the model",
            signatures=_mistakes(states),
            rtol=0,
            atol=0,
        )
        for rank, result in enumerate(outcome.results):
            lab.require(
                result["same"],
                "new parameters",
                "The model has other parameter objects than before, or other flags. An optimizer that was "
                "made before would go on training the old ones: copy values into them.",
                rank=rank,
            )
        lab.note(f"{nproc} ranks: all have rank 0's parameters and buffers")
    counted = lab.call(synchronise, (COUNTED_WIDTH,), 3, via=start, pace=Pace(), tried="counting")
    model = Net(0, COUNTED_WIDTH)
    once = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    sent = sum(int(row["payload_bytes"]) for row in counted.run.traffic[0].values())
    lab.require(
        sent <= once + SLACK_BYTES,
        "sent twice",
        "More travels than the model has. The tied weight is one tensor with two names: send it once.",
        expected=f"{once:,} bytes",
        got=f"{sent:,} bytes",
    )
    lab.note(f"each tensor is sent once: {sent:,} bytes")


def start(synchronise: Callable, width: int) -> dict[str, Any]:
    """In a rank: a model of its own, synchronised."""
    model = Net(dist.get_rank(), width)
    before = [(id(p), p.requires_grad) for p in model.parameters()]
    synchronise(model)
    after = [(id(p), p.requires_grad) for p in model.parameters()]
    return {"state": {n: t.clone() for n, t in model.state_dict().items()}, "same": before == after}


def _mistakes(states: list[dict[str, Tensor]]) -> list[Signature]:
    """What the usual mistakes leave on each rank."""
    buffers = {name for name, _ in Net(0).named_buffers()}
    nproc = len(states)

    def all_but(own: set[str]) -> list[dict[str, Tensor]]:
        return [{n: (state if n in own else states[0])[n] for n in state} for state in states]

    mean = {n: torch.stack([s[n].double() for s in states]).mean(0).to(states[0][n].dtype) for n in states[0]}
    mean_of_parameters = [{n: (state if n in buffers else mean)[n] for n in state} for state in states]
    averaged = (
        "The ranks' models were averaged. All are to have rank 0's: the mean of random weights is no start."
    )
    frozen = "The frozen bias is still each rank's own. It is not trained, and so would differ for ever."
    return [
        equals(
            "never synchronised",
            "Every rank still has the model that it made itself. Nothing was exchanged, or a copy was.",
            states,
        ),
        equals(
            "buffers forgotten",
            "The parameters are rank 0's, but the buffers (BatchNorm's statistics) are each rank's own.",
            all_but(buffers),
        ),
        equals("frozen parameters forgotten", frozen, all_but({FROZEN})),
        equals("frozen parameters forgotten", frozen, all_but({FROZEN, *buffers})),
        equals(
            "parameters forgotten",
            "The buffers are rank 0's, but the parameters are still each rank's own.",
            all_but(set(states[0]) - buffers),
        ),
        equals("averaged", averaged, [mean] * nproc),
        equals("averaged", averaged, mean_of_parameters),
        equals(
            "another root",
            f"All ranks have rank {nproc - 1}'s model. Rank 0's is asked for.",
            [states[-1]] * nproc,
        ),
    ]
