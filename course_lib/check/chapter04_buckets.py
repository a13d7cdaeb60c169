"""Exercise 4.1: which buckets will DDP make of a model?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from course_lib.buckets import MIB, assign_buckets, bucket_bytes
from course_lib.check import chapter04_pictures as pictures
from course_lib.check import chapter04_ranks as ranks
from course_lib.check.chapter04_ranks import ModelSpec
from course_lib.check.lab import Lab, Outcome
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import Signature, equals
from course_lib.launch import launch

CASES = (
    (ModelSpec("four layers", (300, 512, 512, 512, 100)), 0.5),
    (ModelSpec("six layers that fill the cap exactly", (512,) * 7, bias=False), 2.0),
    (ModelSpec("six layers of 1,000,000 bytes", (500,) * 7, bias=False), 1.0),
    (ModelSpec("a frozen layer", (300, 512, 512, 512, 100), frozen=(1,)), 0.5),
    (ModelSpec("float64", (300, 256, 256, 256, 100), dtype="float64"), 0.8),
    (ModelSpec("a tied weight", (512,) * 5, tied=True), 1.5),
    (ModelSpec("all in one bucket", (512,) * 5), 25.0),
)


@exercise(
    "4.1",
    "Which buckets will DDP make?",
    hints=(
        Hint(
            "I do not know where to begin",
            "Walk through `reversed(list(model.parameters()))`, add up `parameter.nbytes`, and write the sum "
            "down whenever a bucket is full.",
            fits=("forward order", "wrong type", "nothing returned", "the wrong order"),
        ),
        Hint(
            "The sizes are right for some models only",
            "A bucket is closed by the parameter that makes it reach its cap, `cap_mb * 2**20` bytes, and "
            "that parameter belongs to it. Parameters without `requires_grad` have no gradient to send. "
            "`parameter.nbytes` knows the dtype.",
            fits=(
                "above the cap",
                "closed too early",
                "MB, not MiB",
                "frozen parameters counted",
                "elements, not bytes",
                "four bytes assumed",
                "parameters split",
                "the last bucket is missing",
            ),
        ),
        Hint("What it should look like", "Six layers, a cap of 2 MiB.", picture=pictures.packing),
    ),
)
def judge_bucket_sizes(lab: Lab, predict_buckets: Callable) -> None:
    """Predicted sizes against those in real DDP's own log."""
    specs, caps = [spec for spec, _ in CASES], [cap for _, cap in CASES]
    outcome = lab.call(
        predict_buckets, (specs, caps), 1, via=ranks.predict_in_rank, tried=f"with {len(CASES)} models"
    )
    for (spec, cap), mine, theirs in zip(CASES, outcome.results[0], _real_buckets(), strict=True):
        one = Outcome([mine], outcome.run, f"`predict_buckets` for {spec.name}, cap_mb={cap:g}")
        lab.same(one, [theirs], what="the buckets in DDP's own log", signatures=_misread(spec, cap, theirs))
    lab.note(f"{len(CASES)} models: the sizes are those in real DDP's own log")


@functools.cache
def _real_buckets() -> list[list[int]]:
    """The buckets of each case in real DDP; asked once a notebook, since DDP's rule does not change."""
    from torch.nn.parallel import DistributedDataParallel

    specs, caps = [spec for spec, _ in CASES], [cap for _, cap in CASES]
    call = (DistributedDataParallel, specs, caps)
    return launch(ranks.real_buckets, 2, args=call, backend="gloo", progress=False).results[0]


def _misread(spec: ModelSpec, cap: float, real: list[int]) -> list[Signature]:
    """What the usual misreadings of DDP's rules would give."""
    parameters = [p for p in spec.build().parameters() if p.requires_grad]
    sizes = [p.nbytes for p in parameters]
    elements = [p.numel() for p in parameters]
    every = [p.nbytes for p in spec.build().parameters()]
    untied = [p.nbytes for layer in spec.build() for p in layer.parameters() if p.requires_grad]
    limit = int(cap * MIB)

    def packed(of: Sequence[int], cap_mb: float | None = cap) -> list[int]:
        return bucket_bytes(of, assign_buckets(of, cap_mb))

    early: list[int] = []
    above: list[int] = []
    fresh = True
    for size in reversed(sizes):
        early[-1:] = [early[-1] + size] if early and early[-1] + size <= limit else [*early[-1:], size]
        above = [*above, size] if fresh else [*above[:-1], above[-1] + size]
        fresh = above[-1] > limit
    by_bytes = assign_buckets(sizes, cap)
    wrong = {
        "forward order": (
            "The buckets are filled from the first layer on. Backward reaches the last layer first, so DDP "
            "fills them in reverse.",
            packed(sizes[::-1]),
        ),
        "above the cap": (
            "A bucket stays open here until it is larger than its cap. It closes when it has reached it.",
            above,
        ),
        "MB, not MiB": (
            "The cap is taken for megabytes of 1,000,000 bytes. `bucket_cap_mb` counts MiB, of 2**20.",
            packed(sizes, cap * 1e6 / MIB),
        ),
        "closed too early": (
            "A bucket is closed here before the parameter that would make it exceed its cap. DDP adds that "
            "parameter, and closes the bucket then: buckets may be larger than the cap.",
            early,
        ),
        "parameters split": (
            "These buckets are cut at the cap exactly. DDP never splits a parameter.",
            [limit] * (sum(sizes) // limit) + ([sum(sizes) % limit] if sum(sizes) % limit else []),
        ),
        "frozen parameters counted": (
            "Parameters that do not train are counted. They have no gradient, so there is nothing to send.",
            packed(every),
        ),
        "the shared weight twice": (
            "The tied weight is counted twice. It is one parameter with one gradient; `parameters()` names "
            "it once.",
            packed(untied),
        ),
        "four bytes assumed": (
            "Every element is taken for 4 bytes. This model is in float64: ask `parameter.nbytes`.",
            packed([4 * count for count in elements]),
        ),
        "elements, not bytes": (
            "These are numbers of elements. A gradient has `element_size()` bytes for each.",
            bucket_bytes(elements, by_bytes),
        ),
        "MiB, not bytes": ("These are MiB. The answer is to be in bytes.", [size / MIB for size in real]),
        "the last bucket is missing": (
            "The last bucket is missing: what is left when all parameters are seen is sent too, full or not.",
            real[:-1],
        ),
        "one bucket": (
            "One bucket for everything is what DDP has in its first iteration. Asked for are those that it "
            "builds before the second.",
            [sum(sizes)],
        ),
        "a first bucket of 1 MiB": (
            "The first bucket's cap is 1 MiB only while `bucket_cap_mb` is left at its default.",
            bucket_bytes(sizes, _with_first_of_one_mib(sizes, cap)),
        ),
    }
    also = [equals("elements, not bytes", wrong["elements, not bytes"][0], [packed(elements)])]
    return [equals(key, says, [values]) for key, (says, values) in wrong.items()] + also


def _with_first_of_one_mib(sizes: list[int], cap: float) -> list[list[int]]:
    """The buckets if the first one's cap were 1 MiB and that of all others `cap`."""
    first = assign_buckets(sizes, 1.0)[0]
    rest = sizes[: len(sizes) - len(first)]
    return [first, *assign_buckets(rest, cap)]
