"""Exercise 4.3: choose a bucket cap for a given link."""

from __future__ import annotations

from typing import Any

from course_lib.buckets import MIB, assign_buckets
from course_lib.check import chapter04_pictures as pictures
from course_lib.check import chapter04_ranks as ranks
from course_lib.check.chapter04_ranks import LINK, LINK_RANKS, link_model
from course_lib.check.lab import Lab, NotYet
from course_lib.check.registry import Hint, exercise
from course_lib.launch import launch
from course_lib.simulate import best, simulate_step, sweep_bucket_caps

TOLERANCE = 0.03


def _expected_seconds(cap_mb: float) -> float:
    assert LINK.gbps is not None
    return simulate_step(link_model(), LINK_RANKS, LINK.gbps, LINK.latency_us, cap_mb).step_seconds


def best_cap() -> tuple[float, float]:
    """The best cap of all, and the seconds of its step, by the simulator."""
    assert LINK.gbps is not None
    layer = link_model()[0].parameter_bytes[0] / MIB
    caps = [layer * count for count in range(1, len(link_model()) + 1)]
    chosen = best(sweep_bucket_caps(link_model(), caps, LINK_RANKS, LINK.gbps, LINK.latency_us))
    assert chosen.bucket_cap_mb is not None
    return chosen.bucket_cap_mb, chosen.step_seconds


@exercise(
    "4.3",
    "Choose a cap for a link",
    hints=(
        Hint(
            "I would have to guess",
            "`sweep_bucket_caps(model, caps, ranks, gbps, latency_us)` simulates a step for each cap, and "
            "`best(…)` picks the shortest.",
        ),
        Hint(
            "Which way is better?",
            "A bucket pays 2 (n - 1) latencies, 9 ms here. Sixteen buckets pay that sixteen times. One "
            "bucket pays it once, and starts when backward is over. Look between.",
            fits=("latency dominates", "nothing left to overlap"),
        ),
        Hint("What it should look like", "The step over the cap.", picture=lambda: pictures.cap_curve()),
    ),
)
def judge_cap(lab: Lab, cap_mb: Any) -> None:
    """The step at this cap against the best of all caps, simulated; then run for real."""
    from torch.nn.parallel import DistributedDataParallel

    cap = lab.number(cap_mb, what="`cap_mb`", low=0)
    seconds, (best_mb, least) = _expected_seconds(cap), best_cap()
    worse = seconds / least - 1
    facts: dict[str, Any] = {
        "expected": f"a step within {TOLERANCE:.0%} of the shortest, {least * 1e3:.0f} ms (modelled)",
        "got": f"{seconds * 1e3:.0f} ms with cap_mb={cap:g}, {worse:.0%} longer",
    }
    if worse > TOLERANCE:
        buckets = len(assign_buckets([size for layer in link_model() for size in layer.parameter_bytes], cap))
        if cap < best_mb:
            raise NotYet(
                "latency dominates",
                f"Too small: {buckets} buckets pay {2 * (LINK_RANKS - 1) * LINK.latency_us / 1e3:.0f} ms of "
                "latency each, one after the other on one link.",
                **facts,
            )
        raise NotYet(
            "nothing left to overlap",
            f"Too large: {'all gradients share one bucket' if buckets == 1 else f'of {buckets} buckets'}"
            f"{', which' if buckets == 1 else ' the first'} cannot start before much of backward is over.",
            **facts,
        )
    inputs = (DistributedDataParallel, *ranks.LINK_MODEL.values(), cap)
    run = launch(ranks.time_ddp_in_rank, LINK_RANKS, args=inputs, backend="gloo", pace=LINK, progress=False)
    lab.note(f"modelled: {seconds * 1e3:.0f} ms a step; the best cap gives {least * 1e3:.0f} ms")
    lab.note(f"paced: real DDP took {min(run.results[0]) * 1e3:.0f} ms a step with this cap")
