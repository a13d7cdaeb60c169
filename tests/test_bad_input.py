"""Requests that make no sense: each gets an error that says what was given, what is allowed, what to do."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import rank_processes

from course_lib import Pace, RankError, launch

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("nproc", [0, -1, 10_000])
def test_a_number_of_ranks_that_cannot_run_is_refused(nproc):
    with pytest.raises(ValueError, match=f"nproc={nproc}"):
        launch(int, nproc)


@pytest.mark.parametrize("nproc", [True, 2.5, "4", None])
def test_what_is_not_a_number_of_ranks_is_refused(nproc):
    with pytest.raises(TypeError, match="pass an int"):
        launch(int, nproc)


def test_a_limit_on_ranks_explains_itself():
    with pytest.raises(ValueError, match="A job can have at most"):
        launch(int, 10_000)


@pytest.mark.parametrize("gbps", [0, -1, float("nan"), float("inf"), 1e9, True, "1"])
def test_a_bandwidth_that_makes_no_sense_is_refused(gbps):
    with pytest.raises((ValueError, TypeError), match="gbps"):
        Pace(gbps=gbps)


@pytest.mark.parametrize("latency_us", [-1, float("nan"), float("inf"), 1e12, True, "1"])
def test_a_latency_that_makes_no_sense_is_refused(latency_us):
    with pytest.raises((ValueError, TypeError), match="latency_us"):
        Pace(gbps=1, latency_us=latency_us)


def test_nccl_without_gpus_is_refused_before_anything_starts():
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    with pytest.raises(ValueError, match="nccl"):
        launch(int, 2, backend="nccl")


@pytest.mark.parametrize("backend", ["mpi", "", 3])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises((ValueError, TypeError), match="backend"):
        launch(int, 2, backend=backend)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_makes_no_sense_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        launch(int, 1, timeout=timeout)


def test_calling_the_function_instead_of_passing_it_is_explained():
    with pytest.raises(TypeError, match="pass `train`, not `train"):
        launch(0, 1)


def test_an_argument_of_the_function_given_to_launch_is_sent_to_kwargs():
    with pytest.raises(TypeError, match=r'launch\(dict, kwargs=\{"epochs": 2\}\)'):
        launch(dict, 2, epochs=2)


@pytest.mark.parametrize("wrong", [{"args": 3}, {"kwargs": [1]}, {"pace": 1.0}, {"timeout": "5"}])
def test_arguments_of_the_wrong_type_are_named(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        launch(int, 1, **wrong)


def test_a_function_that_cannot_travel_names_the_object():
    settings = {"lock": threading.Lock()}

    def work():
        return settings

    with pytest.raises(TypeError, match=r"`settings`, which work uses\['lock'\] is a _thread.lock"):
        launch(work, 2)


def test_an_argument_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"argument guard is a _thread\.lock"):
        launch(dict, 2, kwargs={"guard": threading.Lock()})


def test_a_result_that_cannot_come_back_is_named_and_the_others_are_kept():
    def work():
        import os

        return {"loss": 0.5, "model": torch.nn.Linear(2, 2) if os.environ["RANK"] == "1" else None}

    with pytest.raises(
        RankError, match=r"result\['model'\] is a .*Linear.*return its state_dict\(\)"
    ) as caught:
        launch(work, 2)
    assert caught.value.run.results[0] == {"loss": 0.5, "model": None}
    assert not caught.value.run.results[1]
    assert rank_processes() == []


def test_a_pace_cannot_be_had_over_nccl():
    with pytest.raises(ValueError, match="nccl"):
        launch(int, 2, backend="nccl", pace=Pace(gbps=1))
