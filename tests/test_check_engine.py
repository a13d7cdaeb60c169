"""The engine of the exercises: three outcomes, diagnoses by signature, limits, hints, progress."""

from __future__ import annotations

import json
import os
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import Pace
from course_lib.check import CheckFailed, Hint, Lab, NotYet, check, equals, exercise
from course_lib.check.compare import mismatch
from course_lib.check.diagnosis import diagnose
from course_lib.check.registry import all_exercises, find
from course_lib.check.trouble import untouched

# Answers travel by value, as they do from a notebook: a rank does not import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr("course_lib.check.progress._memory", {})
    return tmp_path / "progress.json"


# Outcomes of a check


def average(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def summed(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def stub(value: float) -> float:
    """The mean."""
    raise NotImplementedError("your code here")


def half_a_stub(value):
    torch.ones(3).sum()
    if dist.get_rank() == 0:
        raise NotImplementedError("your code here")
    dist.barrier()


def only_a_docstring(value):
    """The mean."""


def only_dots(value): ...


@pytest.mark.usefixtures("nothing_left")
def test_a_right_answer_passes_and_says_what_was_checked():
    result = check("0.1", average)
    assert result.passed and result.outcome == "passed" and result.checked
    assert repr(result).startswith("Passed: 0.1")
    assert "Passed: 0.1" in result._repr_html_()


@pytest.mark.parametrize(
    "answer", [stub, half_a_stub, only_a_docstring, only_dots, lambda v: None, None, ...]
)
def test_a_stub_is_not_attempted(answer, nothing_left):
    result = check("0.1", answer)
    assert (result.outcome, result.diagnosis) == ("not attempted", "")
    assert "Not attempted" in repr(result) and "Not attempted" in result._repr_html_()


def test_an_error_of_torch_is_no_stub():
    def meta(value):
        return torch.ones(1, device="meta").item()

    def not_implemented(value):
        raise NotImplementedError("no kernel for this dtype")

    assert check("0.1", meta).outcome == check("0.1", not_implemented).outcome == "not yet"
    assert not untouched(average) and not untouched(0) and not untouched(len)


@pytest.mark.usefixtures("nothing_left")
def test_a_wrong_answer_says_what_was_tried_expected_and_got_where_and_gives_a_hint():
    result = check("0.1", summed)
    assert (result.outcome, result.diagnosis) == ("not yet", "a sum, not a mean")
    for said in ("3 ranks", "mean", "18.5", "rank 0", "Hint", 'check.hint("0.1")'):
        assert said in repr(result), said
    assert "<code>all_reduce</code>" in result._repr_html_()


def test_strict_raises_unless_the_answer_passed():
    check("0.1", average, strict=True)
    for answer in (summed, stub):
        with pytest.raises(CheckFailed, match=r"0\.1") as caught:
            check("0.1", answer, strict=True)
        assert not caught.value.result.passed


# What learners' code can do to a check


def endless(value):
    while True:
        pass


def endless_in_c(value):
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def sleeps(value):
    time.sleep(600)


def deadlock(value):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    return value


def exits(value):
    sys.exit(0)


def exits_at_once(value):
    os._exit(0)


def segfault(value):
    import ctypes

    ctypes.string_at(0)


def fails(value):
    return value.nothing


def fails_on_rank_1(value):
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has a problem")
    dist.barrier()


def recursion(value):
    return recursion(value)


def an_object(value):
    return object()


def a_generator(value):
    yield value


def prints_much(value):
    for _ in range(100_000):
        print("x" * 100)
    return value


def no_arguments():
    return 1.0


def mutates(value):
    value.mul_(2)
    return value


BROKEN = {
    "endless loop": [endless, endless_in_c, sleeps],
    "deadlock": [deadlock],
    "left early": [exits, exits_at_once],
    "crash": [segfault],
    "an error": [fails, fails_on_rank_1, recursion, no_arguments],
    "wrong type": [
        an_object,
        a_generator,
        lambda v: "text",
        lambda v: True,
        lambda v: torch.ones(2),
        3.0,
        "text",
    ],
    "zeros": [lambda v: 0.0],
    "never synchronised": [lambda v: v, prints_much],
    "not a number": [lambda v: float("nan"), lambda v: float("inf")],
    "the ranks differ": [lambda v: v + 1.5 + torch.rand(()).item()],
    "one rank's value everywhere": [lambda v: 3.5 if dist.get_world_size() == 2 else 2.5],
}


@pytest.mark.parametrize(
    ("diagnosis", "answer"), [(name, answer) for name, answers in BROKEN.items() for answer in answers]
)
def test_whatever_an_answer_does_ends_in_a_message_within_the_limit(diagnosis, answer, nothing_left):
    began = time.monotonic()
    result = check("0.1", answer)
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result
    assert time.monotonic() - began < 15 and result.message and result.hint
    assert len(repr(result)) < 8000 and result._repr_html_()


def test_what_the_answer_printed_is_shown_by_rank():
    def prints(value):
        print("I have", value)
        return value

    assert "rank 2 printed: I have 10.5" in repr(check("0.1", prints))


def test_a_function_that_cannot_travel_is_told_what_holds_it_back():
    import threading

    lock = threading.Lock()

    def locked(value):
        with lock:
            return value

    result = check("0.1", locked)
    assert result.diagnosis == "cannot travel" and "lock" in result.message


def test_an_input_that_is_edited_in_place_is_seen_in_the_rank():
    with pytest.raises(NotYet) as caught:
        Lab(20).call(mutates, [(torch.ones(3),)] * 2, 2)
    assert caught.value.diagnosis == "edits its input" and "argument 1" in caught.value.says
    assert Lab(20).call(mutates, [(torch.ones(3),)] * 2, 2, may_edit=True).results[1].sum() == 6


def test_a_judge_that_stumbles_neither_passes_nor_raises(monkeypatch):
    register_temporary(monkeypatch, lambda lab, answer: answer.nothing)
    result = check("99.1", 3)
    assert (result.outcome, result.diagnosis) == ("not yet", "unexpected answer")


def test_all_jobs_of_a_check_share_one_limit(monkeypatch):
    def judge(lab, answer):
        for _ in range(50):
            lab.call(answer, (), 1)

    register_temporary(monkeypatch, judge, limit=2)
    began = time.monotonic()
    assert check("99.1", lambda: time.sleep(0.7)).diagnosis == "too slow"
    assert time.monotonic() - began < 6


def register_temporary(monkeypatch, judge, **options):
    from course_lib.check import registry

    monkeypatch.setattr(registry, "_exercises", dict(registry._exercises))
    hints = (Hint("first", "one"), Hint("second", "two", fits=("fitting",)), Hint("third", "three"))
    exercise("99.1", "For a test", hints=hints, **options)(judge)


# Ranks, counts


def observed():
    return dist.get_rank(), dist.get_world_size(), torch.rand(1).item()


def counted():
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0)
    dist.all_reduce(torch.ones(1000))


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_an_answer_runs_on_real_ranks_with_seeds_of_their_own(nproc):
    results = Lab(20).call(observed, (), nproc).results
    assert [r[:2] for r in results] == [(rank, nproc) for rank in range(nproc)]
    assert len({r[2] for r in results}) == nproc


def test_collectives_are_counted_by_rank():
    outcome = Lab(20).call(counted, (), 2, pace=Pace())
    assert outcome.calls("all_reduce") == [2, 2] and outcome.calls("broadcast") == [1, 1]
    assert outcome.payload_bytes("all_reduce") == [8000, 8000]
    assert outcome.bytes_sent("all_reduce") == [8000, 8000]
    assert outcome.collectives()[0] == {"all_reduce": 2, "broadcast": 1}


def test_inputs_come_by_rank():
    assert Lab(20).call(lambda x: x, lambda rank: (rank,), 3).results == [0, 1, 2]
    assert Lab(20).call(lambda x: x, [(5,), (6,)], 2).results == [5, 6]


# Diagnosis by signature

N = 3
LOCAL = [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 7.0]) * (r + 1) ** 2 + r for r in range(N)]
MEAN = torch.stack(LOCAL).mean(0)
PARTS = [torch.tensor([10.0 * r + 1, 10.0 * r + 2]) for r in range(N)]
OTHER = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])

SIGNATURES = {
    "a sum, not a mean": [MEAN * N] * N,
    "averaged twice": [MEAN / N] * N,
    "added twice": [MEAN * N * N] * N,
    "never synchronised": LOCAL,
    "scaled, but never synchronised": [x / N for x in LOCAL],
    "zeros": [torch.zeros(6)] * N,
    "its own input": [OTHER] * N,
    "not a number": [MEAN * torch.nan] * N,
    "one rank's value everywhere": [LOCAL[1]] * N,
    "one share is missing": [(LOCAL[0] + LOCAL[1]) / N] * N,
    "the wrong sign": [-MEAN] * N,
    "only one rank is right": [MEAN, LOCAL[1], LOCAL[2]],
    "the wrong order": [MEAN.roll(2)] * N,
    "off by a factor": [MEAN * 0.7] * N,
    "the ranks differ": [MEAN + r * OTHER for r in (-1, 1, 3)],
    "nearly right": [MEAN + 0.001 * OTHER] * N,
    "wrong values": [OTHER * OTHER] * N,
    "wrong shape": [MEAN[None]] * N,
    "wrong dtype": [MEAN.double()] * N,
    "wrong type": [MEAN.tolist()] * N,
    "nothing returned": [None] * N,
}


@pytest.mark.parametrize("diagnosis", SIGNATURES)
def test_wrong_values_are_recognised_by_their_signature(diagnosis):
    found = diagnose(SIGNATURES[diagnosis], [MEAN] * N, "the mean", LOCAL, [OTHER] * N)
    assert found is not None and found.diagnosis == diagnosis, found
    assert found.expected and found.got and found.rank is not None


@pytest.mark.parametrize(
    ("diagnosis", "got"),
    [
        ("another rank's part", [PARTS[1], PARTS[2], PARTS[0]]),
        ("all ranks the same", [PARTS[0]] * N),
        ("wrong shape", [torch.cat(PARTS)] * N),
    ],
)
def test_parts_on_the_wrong_rank_are_recognised(diagnosis, got):
    found = diagnose(got, PARTS, "the chunk")
    assert found is not None and found.diagnosis == diagnosis


def test_a_lost_remainder_is_recognised():
    right = torch.arange(1.0, 8.0)
    got = right.clone()
    got[6] = 0
    found = diagnose([got] * N, [right] * N, "the sum")
    assert found is not None and found.diagnosis == "the remainder is lost"


def test_right_results_are_never_diagnosed():
    assert diagnose([MEAN] * N, [MEAN] * N, "the mean", LOCAL, [OTHER] * N) is None
    assert diagnose([MEAN * (1 + 1e-6)] * N, [MEAN] * N, "the mean", LOCAL) is None
    # A degenerate case: where local and mean are the same, holding the local values is right.
    assert diagnose([MEAN] * N, [MEAN] * N, "the mean", [MEAN] * N) is None


def test_only_the_part_that_is_wrong_is_diagnosed_and_named():
    expected = [{"weight": MEAN, "bias": OTHER}] * N
    got = [{"weight": MEAN, "bias": OTHER * N}] * N
    found = diagnose(got, expected, "the gradients")
    assert found is not None and found.diagnosis == "a sum, not a mean" and "`bias`" in found.says


def test_an_exercises_own_signature_comes_first():
    own = equals("the well-known mistake", "You did it.", [MEAN * N] * N)
    found = diagnose([MEAN * N] * N, [MEAN] * N, "the mean", signatures=[own])
    assert found is not None and (found.diagnosis, found.says) == ("the well-known mistake", "You did it.")


@pytest.mark.parametrize(
    ("got", "expected", "diagnosis"),
    [
        ([1, 2], (1, 2), None),
        (torch.tensor(2.0), 2.0, None),
        (2, 2.0, None),
        ([1], [1, 2], "wrong length"),
        ({"a": 1}, {"b": 1}, "wrong keys"),
        ({"a": None}, {"a": 1}, "nothing returned"),
        ("1", 1, "wrong type"),
        (True, 1, "wrong type"),
        (1, "a", "wrong type"),
        ([torch.ones(2)], [torch.ones(3)], "wrong shape"),
    ],
)
def test_structure_is_compared_before_values(got, expected, diagnosis):
    found = mismatch(got, expected)
    assert (found and found[0]) == diagnosis


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype_can_be_compared(dtype):
    right = torch.tensor([1, 0, 3, 1]).to(dtype)
    assert diagnose([right, right], [right, right], "the tensor") is None
    wrong = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert diagnose([wrong, wrong], [right, right], "the tensor") is not None


# Names, hints, progress, report


@pytest.mark.parametrize("name", ["9.9", "x", "4", None, 7, "", "99.99"])
def test_an_unknown_exercise_is_an_error_that_lists_those_there_are(name):
    with pytest.raises(ValueError, match=r"there is no exercise .*0\.1.*4\.1"):
        check(name, average)


def test_the_number_of_answers_is_checked():
    with pytest.raises(TypeError, match=r'check\("0\.1", average\)'):
        check("0.1")
    with pytest.raises(TypeError, match="given 2"):
        check("0.1", average, average)


def test_every_exercise_has_three_hints_and_the_last_shows_a_picture():
    for each in all_exercises():
        assert len(each.hints) == 3, each.name
        assert each.hints[-1].picture is not None, each.name
        assert all(hint.title and hint.text for hint in each.hints)


def test_hints_come_one_by_one_and_the_last_stays():
    shown = [check.hint("0.1") for _ in range(4)]
    assert [hint.number for hint in shown] == [1, 2, 3, 3]
    assert "<svg" in shown[2]._repr_html_() and "picture" in repr(shown[2])
    assert check.hint("0.1", 1).number == 1 and check.hint("0.1").number == 3
    for wrong in (0, 4, True, "1"):
        with pytest.raises(ValueError, match="hints 1 to 3"):
            check.hint("0.1", wrong)


def test_a_check_shows_the_hint_that_fits_and_the_next_one_follows_it(monkeypatch):
    def judge(lab, answer):
        lab.require(answer == 1, "fitting" if answer == 2 else "other", "Not one.")

    register_temporary(monkeypatch, judge)
    assert check("99.1", 3).hint.title == "first" and check.hint("99.1").hint.title == "second"
    assert check("99.1", 2).hint.title == "second" and check.hint("99.1").hint.title == "third"


def test_progress_is_kept_and_a_pass_stays_a_pass(own_progress):
    check("0.1", summed)
    check("0.1", stub)
    row = json.loads(own_progress.read_text())["exercises"]["0.1"]
    assert (row["outcome"], row["diagnosis"], row["tries"]) == ("not yet", "a sum, not a mean", 1)
    check("0.1", average)
    check("0.1", summed)
    report = check.report("Ada")
    row = next(row for row in report.rows if row["name"] == "0.1")
    assert (row["outcome"], row["tries"]) == ("passed", 3) and row["passed"]
    assert f"1 of {len(all_exercises())} exercises passed (Ada)" in repr(report)
    assert "Average a value" in report._repr_html_()
    assert check.report().save(own_progress.parent / "report.txt").read_text().startswith("1 of ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"exercises": 3}',
        '{"exercises": {"0.1": 7}}',
        '{"exercises": {"0.1": {"hints": "x", "tries": null}}}',
        "\x00\xff",
    ],
)
def test_a_spoilt_progress_file_is_no_obstacle(own_progress, text):
    own_progress.write_text(text)
    assert check("0.1", stub).outcome == "not attempted"
    assert check.hint("0.1").number == 1
    assert check.report().rows
    assert json.loads(own_progress.read_text())["exercises"]["0.1"]["hints"] == 1


def test_checks_go_on_where_progress_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "no" / "such" / "directory.json"))
    check("0.1", stub)
    assert [check.hint("0.1").number for _ in range(2)] == [1, 2]
    assert check.report().rows[0]["hints"] == 2


def test_progress_stands_beside_the_notebook_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_LIB_PROGRESS")
    monkeypatch.chdir(tmp_path)
    check.hint("0.1")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_names_may_be_written_as_numbers():
    assert find(4.1).name == "4.1" and find(" 4.1 ").name == "4.1"
