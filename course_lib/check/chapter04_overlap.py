"""Exercise 4.2: buckets with overlap, by hand."""

from __future__ import annotations

from typing import Any

import torch

from course_lib.buckets import assign_buckets
from course_lib.check import chapter04_pictures as pictures
from course_lib.check import chapter04_ranks as ranks
from course_lib.check.chapter04_ranks import TIMED, TIMED_PACE, ModelSpec
from course_lib.check.compare import vector
from course_lib.check.lab import Lab, NotYet, Outcome
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import Evidence, Signature, close, equals
from course_lib.pace import Pace

PLAIN = ModelSpec("four layers", (12, 20, 20, 20, 3), dtype="float64")
FROZEN = ModelSpec("a frozen layer", (12, 20, 20, 20, 3), dtype="float64", frozen=(1,))
TIED = ModelSpec("a tied weight", (16, 16, 16, 16), dtype="float64", tied=True)
SMALL_CAP = 0.002
LEAST_SAVING = 0.2
NOT_WAITED = (
    "The gradients are read before the other ranks' have arrived. `async_op=True` returns a handle at once; "
    "only after its `wait()` is the result there."
)


@exercise(
    "4.2",
    "Buckets with overlap, by hand",
    hints=(
        Hint(
            "Where do I put what?",
            "In `__init__`, decide the buckets and register one hook on each parameter that trains. The hook "
            "counts; the last gradient of a bucket starts `dist.all_reduce(flat, async_op=True)` and keeps "
            "what it returns. `finish` waits for each, and copies the averages back.",
            fits=("never synchronised", "never copied back", "an error", "the last bucket is never sent"),
        ),
        Hint(
            "The gradients are wrong",
            "Divide once, by the number of ranks. Wait before you read. Copy into `parameter.grad`. And set "
            "every count back for the next step.",
            fits=(
                "a sum, not a mean",
                "averaged twice",
                "did not wait",
                "scaled, but never synchronised",
                "only the first step is right",
                "frozen parameters",
            ),
        ),
        Hint(
            "It is right, but no faster",
            "Nothing may wait inside backward, and nothing may wait for backward's end. Below: all buckets "
            "sent after backward; and each sent as soon as it is full.",
            picture=pictures.overlap,
            fits=("waits in the hook", "sends after backward"),
        ),
    ),
)
def judge_overlap(lab: Lab, overlapped_ddp: type) -> None:
    """Values over three steps, then counts, then a paced ratio."""
    for spec, nproc in ((PLAIN, 3), (FROZEN, 2), (TIED, 4)):
        _same_as_one_process(lab, overlapped_ddp, spec, nproc)
        lab.note(f"{spec.name}, {nproc} ranks: gradients of one process on the whole batch, in three steps")
    _count_calls(lab, overlapped_ddp)
    _time_overlap(lab, overlapped_ddp)


def _same_as_one_process(lab: Lab, answer: type, spec: ModelSpec, nproc: int) -> None:
    whole, local = ranks.oracle(spec, nproc)
    try:
        outcome = lab.call(
            answer, (spec, SMALL_CAP), nproc, via=ranks.train_in_rank, tried=spec.name, stagger=0.05
        )
    except NotYet as found:
        if "doesn't require gradient" in found.details:
            found.diagnosis = "frozen parameters"
            found.says = (
                "A hook was registered on a parameter that does not train. It gets no gradient: skip it."
            )
        raise
    names = [name for name, p in spec.build().named_parameters() if p.requires_grad]
    last = {names[position] for position in assign_buckets(spec.parameter_bytes(), SMALL_CAP)[-1]}
    for step in range(ranks.STEPS):
        got = [result[step] for result in outcome.results]
        mixed = [
            {name: own[name] if name in last else mean for name, mean in whole[step].items()}
            for own in local[step]
        ]
        unsent = equals(
            "the last bucket is never sent",
            "The gradients of the first layers are still local: the last bucket is not full when backward "
            "ends, and was never sent.",
            mixed,
        )
        counts = equals(
            "only the first step is right",
            "The first step is right, and in the next nothing is exchanged. Are the counts of missing "
            "gradients set back?",
            local[step],
        )
        signatures = [_did_not_wait(local[step]), unsent] + ([counts] if step else [])
        one = Outcome(got, outcome.run, f"{outcome.tried}, step {step}")
        try:
            lab.same(
                one, [whole[step]] * nproc, what="the gradient ", local=local[step], signatures=signatures
            )
        except NotYet as found:
            raise _looked_closer(lab, answer, found) from None


def _looked_closer(lab: Lab, answer: type, found: NotYet) -> NotYet:
    """Local gradients have two causes, which the number of collectives tells apart."""
    causes = {
        "never synchronised": (
            "never copied back",
            "The averages travel, but `parameter.grad` never gets them: copy them back in `finish`.",
        ),
        "scaled, but never synchronised": ("did not wait", NOT_WAITED),
    }
    if found.diagnosis in causes:
        try:
            counted = lab.call(answer, (PLAIN, SMALL_CAP), 2, via=ranks.train_in_rank, pace=Pace())
        except NotYet:
            return found
        if min(counted.calls("all_reduce")) > 0:
            found.diagnosis, found.says = causes[found.diagnosis]
    return found


def _did_not_wait(local: list[dict[str, torch.Tensor]]) -> Signature:
    """Rank 0 starts first, so what it reads without waiting is its own, scaled or not."""
    own = [vector(values) for values in local]

    def recognise(evidence: Evidence) -> str | None:
        first = own[0]
        if first is None or any(value is None for value in own):
            return None
        scaled = [1.0, 1 / evidence.nproc, 1 / evidence.nproc**2]
        early = any(close(evidence.got[0], first * factor) for factor in scaled)
        everyone = any(evidence.is_([v * factor for v in own if v is not None]) for factor in scaled)
        if early and not everyone:
            return NOT_WAITED
        return None

    return Signature("did not wait", recognise)


def _count_calls(lab: Lab, answer: type) -> None:
    buckets = len(assign_buckets(PLAIN.parameter_bytes(), SMALL_CAP))
    outcome = lab.call(answer, (PLAIN, SMALL_CAP), 2, via=ranks.train_in_rank, tried="counted", pace=Pace())
    calls, asked = outcome.calls("all_reduce"), buckets * ranks.STEPS
    parameters = len(PLAIN.parameter_bytes()) * ranks.STEPS
    facts: dict[str, Any] = {
        "expected": f"{asked} calls of all_reduce in {ranks.STEPS} steps",
        "got": str(calls),
    }
    lab.require(
        calls[0] != parameters, "one call a parameter", "Each gradient travels alone: no buckets.", **facts
    )
    lab.require(
        calls[0] != ranks.STEPS,
        "one bucket",
        "All gradients travel in one bucket. Close a bucket as soon as it has reached `cap_mb` MiB.",
        **facts,
    )
    lab.require(
        calls == [asked] * 2,
        "other buckets",
        "The number of buckets is not that of DDP's rule (exercise 4.1).",
        **facts,
    )
    size = sum(PLAIN.parameter_bytes()) * ranks.STEPS
    sent = outcome.payload_bytes("all_reduce")
    lab.require(
        sent == [size] * 2,
        "other bytes",
        "Each gradient is to be sent once, as it is.",
        expected=f"{size:,} bytes handed over",
        got=f"{sent[0]:,}",
    )
    lab.note(f"{buckets} calls of all_reduce a step, each gradient sent once")


def _time_overlap(lab: Lab, answer: type) -> None:
    """The saving against the same buckets sent after backward; up to three tries, since machines are busy."""
    inputs = (*TIMED.values(), 4)
    saving, sent = -1.0, 0.0
    parts: dict[str, float] = {}
    for _ in range(3):
        reference, mine = (
            lab.call(each, inputs, 2, via=ranks.time_in_rank, tried="paced", pace=TIMED_PACE).results[0]
            for each in (ranks.AfterBackward, answer)
        )
        after = min(step["step"] for step in reference)
        sent = min(step["finish"] for step in reference)
        quickest = min(mine, key=lambda step: step["step"])
        saving, parts = max((saving, parts), (1 - quickest["step"] / after, quickest), key=lambda p: p[0])
        if saving < LEAST_SAVING / 4:
            break
        if saving >= LEAST_SAVING:
            lab.note(f"paced: a step is {saving:.0%} shorter than with the same buckets sent after backward")
            return
    computing = TIMED["layers"] * TIMED["backward_ms"] / 1e3
    stuck = parts["backward"] > computing + 0.6 * sent
    lab.require(
        False,
        "waits in the hook" if stuck else "sends after backward",
        "Backward contains all of the communication: each bucket is waited for inside the hook, so "
        "nothing overlaps. Start it there, and wait in `finish`."
        if stuck
        else "The gradients are right, but they travel when backward is over. Start each bucket in the hook "
        "of its last gradient.",
        expected=f"a step at least {LEAST_SAVING:.0%} shorter than without overlap (paced, {TIMED_PACE})",
        got=f"{max(saving, 0):.0%} shorter",
    )
