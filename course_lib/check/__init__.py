'''Exercises that check themselves: `check("4.1", answer)`, `check.hint("4.1")`, `check.report()`.

    from course_lib.check import check

    check("4.1", predict_buckets)                # shows itself: passed, not yet (why), or not attempted
    check("4.1", predict_buckets, strict=True)   # raises CheckFailed unless it passed
    check.hint("4.1")                            # the next hint
    check.report()                               # all exercises, to show or to hand in

## How to write an exercise group

One module a chapter, `course_lib/check/chapter03.py`, which is found by its name. Each exercise is one
function, its *judge*, which takes a `Lab` and the learner's answers, returns when all is well, and otherwise
lets the lab raise `NotYet`. Its parameters are named as the learner's functions are.

    """The exercises of chapter 03."""

    import torch

    from course_lib import Pace
    from course_lib.check import Hint, Lab, equals, exercise

    @exercise(
        "3.9",
        "Average a tensor over the ranks",
        hints=(
            Hint("It runs, but the values are too large", "all_reduce adds. What turns a sum into a mean?"),
            Hint("Where do I divide?", "Before or after, but once: `tensor / dist.get_world_size()`."),
            Hint("What it should look like", "All ranks hold the same bars.", picture=_bars),
        ),
    )
    def judge_average(lab: Lab, average) -> None:
        for nproc in (3, 2, 4):                        # 3 first: with 2 many mistakes look alike
            local = [torch.randn(5, generator=torch.Generator().manual_seed(r)) for r in range(nproc)]
            outcome = lab.call(average, [(tensor,) for tensor in local], nproc)
            mean = torch.stack(local).mean(0)          # the oracle, computed here and not in the rank
            largest = equals("the maximum", "That is the largest …", [torch.stack(local).amax(0)] * nproc)
            lab.same(outcome, [mean] * nproc, what="the mean", local=local, signatures=[largest])
            lab.note(f"{nproc} ranks: the mean of their tensors")
        counted = lab.call(average, [(tensor,) for tensor in local], 4, pace=Pace())
        lab.require(counted.calls("all_reduce") == [1] * 4, "too many calls", "One all_reduce is enough …",
                    expected="1 call a rank", got=str(counted.calls("all_reduce")))

What the lab does for you (`course_lib/check/lab.py`):

- `lab.call(answer, inputs, nproc, via=harness)` runs `harness(answer, *inputs)` (without `via`:
  `answer(*inputs)`) on real gloo ranks, each seeded differently, and gives an `Outcome` with `results` by
  rank. `inputs` is a tuple, the same for all ranks, a list of one tuple a rank, or a function from rank to
  tuple. Stubs, exceptions, crashes, exits, deadlocks, endless loops, answers that cannot come back, and
  inputs edited in place (unless `may_edit=True`) end the check with a message of their own. `answer` may be
  a tuple of several. `stagger=0.1` starts the ranks one after the other, which exposes answers that do not
  wait.
- `lab.same(outcome, expected, …)` compares type, shape, dtype and values with the oracle, by rank, and names
  what it recognises: first your own `signatures`, then those of `course_lib/check/signatures.py`. Give
  `local` (what each rank holds unsynchronised) and `inputs` so that it can.
- `outcome.calls(name)`, `outcome.payload_bytes(name)`, `outcome.bytes_sent(name)`, `outcome.messages(name)`
  count by rank, in calls with a `pace` (`Pace()` only counts). Values come first, counts next, time last.
- `lab.require(condition, diagnosis, says, expected=…, got=…, rank=…)` is for everything else;
  `lab.number(answer, …)` for answers that are a number; `lab.note("…")` adds to what a pass says.

A judge's `diagnosis` is a short name ("a sum, not a mean") that tests compare; `says` is for the learner:
what they did, then where to look. `Hint(…, fits=("a sum, not a mean",))` is shown first for that diagnosis.
Text between backticks is set as code. A chapter with much to say may import siblings (`chapter03_ring.py`).

In `solutions/NN_name.ipynb` write `check("3.9", average, strict=True)`: then running the solutions proves
that they pass, and `make exercises` takes the `strict=True` out (see `course_lib/exercises.py`).

In tests: `result = check("3.9", wrong)`, then compare `result.outcome` ("not yet") and `result.diagnosis`.
Harnesses are module-level functions, since they travel to ranks.
'''

from course_lib.check.engine import CheckFailed, check
from course_lib.check.lab import Lab, NotYet, Outcome
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import equals

__all__ = ["CheckFailed", "Hint", "Lab", "NotYet", "Outcome", "check", "equals", "exercise"]
