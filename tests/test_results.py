"""What comes back from a rank is data: the same data, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle

import numpy
import pytest
import torch

from course_lib.results import CannotReturn, pack, unpack


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        "한글",
        b"\x00\xff",
        [1, (2, {3}), {"a": [4]}],
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        1 + 2j,
        torch.float16,
        torch.Size([2, 3]),
    ],
)
def test_plain_values_come_back_equal(value):
    assert unpack(pack(value)) == value
    assert type(unpack(pack(value))) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_equal(dtype, shape):
    tensor = (torch.rand(shape) * 10).to(dtype)
    back = unpack(pack(tensor))
    assert back.dtype is dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    back.fill_(1)


def test_views_and_tensors_with_a_graph_come_back_as_plain_values():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    result = weight.t()[1:] * 2
    back = unpack(pack(result))
    assert back.is_leaf and torch.equal(back, result.detach())


def test_a_state_dict_comes_back():
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = unpack(pack(state))
    assert list(back) == list(state)
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_numpy_comes_back():
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    assert numpy.array_equal(unpack(pack(array)), array)
    assert unpack(pack(numpy.float64(1.5))) == 1.5


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "part", "advice"),
    [
        ({"a": [1, torch.nn.Linear(1, 1)]}, r"result\['a'\]\[1\]", "state_dict"),
        (lambda: 1, "result is a function", "what it computes"),
        ([Point(1)], r"result\[0\]", "as a dict"),
        (torch.eye(2).to_sparse(), "sparse", "to_dense"),
    ],
)
def test_what_cannot_come_back_is_named_with_what_to_return_instead(value, part, advice):
    with pytest.raises(CannotReturn, match=part) as caught:
        pack(value)
    assert advice in str(caught.value)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/should-not-exist",)


def test_a_result_that_would_run_code_is_not_loaded():
    with pytest.raises(CannotReturn):
        unpack(pickle.dumps(Evil()))
    assert not os.path.exists("/tmp/should-not-exist")
