"""Data and models load at once, are the same everywhere, and can be learned; the oracle is one process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from course_lib import tasks
from course_lib.tasks import (
    SlowDataset,
    cnn,
    digits,
    digits_dataset,
    mlp,
    next_token_loss,
    tokens,
    transformer,
    whole_batch_gradients,
)

MODELS = {
    "mlp": (mlp, lambda: torch.rand(4, 64)),
    "cnn": (cnn, lambda: torch.rand(4, 64)),
    "transformer": (transformer, lambda: tokens(4)[0]),
}


FIRST_TRAINING_LABELS = [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]

# Data


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images, targets = digits()
    assert images.dtype == torch.float32 and targets.dtype == torch.int64
    assert torch.equal(images, torch.from_numpy(pixels / 16).float())
    assert torch.equal(targets, torch.from_numpy(labels))
    assert images.min() == 0 and images.max() == 1


def test_digits_come_without_importing_scikit_learn():
    code = "import sys; from course_lib.tasks import digits; digits('train'); print('sklearn' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "False"


def test_digits_come_from_scikit_learn_itself_where_its_file_is_not_found(monkeypatch):
    read = digits()
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    loaded = digits()
    assert torch.equal(read[0], loaded[0]) and torch.equal(read[1], loaded[1])


def test_digits_are_split_without_overlap_and_the_same_way_each_time():
    train, test = digits("train"), digits("test")
    assert train[0].shape == (1440, 64) and test[0].shape == (357, 64)
    together = torch.cat([train[0], test[0]])
    assert len(together.unique(dim=0)) == len(digits()[0].unique(dim=0))
    assert torch.equal(digits("train")[0], train[0])
    assert not torch.equal(digits("train", seed=1)[0], train[0])
    # The split of a version of numpy or torch yet to come must be this one.
    assert train[1][:12].tolist() == FIRST_TRAINING_LABELS
    assert train[1].bincount(minlength=10).min() > 100


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r'Use "train", "test"'):
        digits("valid")


def test_the_digits_data_set_feeds_a_data_loader():
    images, labels = next(iter(DataLoader(digits_dataset("test"), batch_size=32)))
    assert torch.equal(images, digits("test")[0][:32]) and torch.equal(labels, digits("test")[1][:32])


def test_tokens_ask_for_the_sequence_backwards_and_for_nothing_else():
    inputs, targets = tokens(count=50, length=5, vocabulary=9)
    assert inputs.shape == targets.shape == (50, 10)
    assert (inputs[:, 5] == 8).all() and (inputs[:, :5] < 8).all()
    assert (targets[:, :5] == -100).all()
    assert torch.equal(targets[:, 5:], inputs[:, :5].flip(1))
    assert torch.equal(inputs[:, 6:], targets[:, 5:-1])
    assert torch.equal(tokens(50, 5, 9)[0], inputs)


def test_a_slow_data_set_gives_the_same_items_later():
    fast = TensorDataset(torch.arange(5))
    slow = SlowDataset(fast, seconds=0.02)
    start = time.monotonic()
    items = [slow[index] for index in range(len(slow))]
    assert time.monotonic() - start >= 5 * 0.02
    assert items == [fast[index] for index in range(5)]
    with pytest.raises(ValueError, match=r"seconds=-0\.1"):
        SlowDataset(fast, seconds=-0.1)


# Models


@pytest.mark.parametrize("name", MODELS)
def test_first_weights_are_those_of_the_seed_whatever_the_rank_was_seeded_with(name):
    make, _ = MODELS[name]
    torch.manual_seed(1)
    first = make().state_dict()
    torch.manual_seed(2)
    second = make().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = make(seed=5).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", MODELS)
def test_making_a_model_leaves_the_global_generator_alone_unless_asked_to_use_it(name):
    make, _ = MODELS[name]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    make()
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(3)
    ours = make(seed=None).state_dict()
    assert not torch.equal(torch.rand(2), expected)
    torch.manual_seed(4)
    assert any(not torch.equal(value, ours[key]) for key, value in make(seed=None).state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    make, inputs = MODELS[name]
    model = make()
    model(inputs()).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_an_mlp_has_the_layers_asked_for():
    shapes = [
        tuple(m.weight.shape) for m in mlp(hidden=(30, 20), inputs=8, outputs=3) if isinstance(m, nn.Linear)
    ]
    assert shapes == [(30, 8), (20, 30), (3, 20)]
    assert [tuple(p.shape) for p in mlp(hidden=7).parameters()] == [(7, 64), (7,), (10, 7), (10,)]
    assert isinstance(mlp()[-1], nn.Linear)


def test_a_cnn_has_batch_norm_where_asked():
    norms = [m for m in cnn(channels=4, batch_norm=True) if isinstance(m, nn.BatchNorm2d)]
    assert [norm.num_features for norm in norms] == [4, 8]
    assert not list(cnn().buffers())


def test_embeddings_are_tied_and_counted_once():
    model = transformer(vocabulary=12, width=32)
    assert model.head.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names and "head.weight" not in names
    assert sum(p.shape == (12, 32) for p in model.parameters()) == 1
    assert {"embedding.weight", "head.weight"} <= set(model.state_dict())


def test_the_transformer_cannot_see_what_comes_later():
    model, (inputs, _) = transformer(), tokens(1)
    changed = inputs.clone()
    changed[0, 7:] = 0
    torch.testing.assert_close(model(inputs)[0, :7], model(changed)[0, :7])
    assert not torch.allclose(model(inputs)[0, 7:], model(changed)[0, 7:])


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="width=30 cannot be shared by 4 heads"):
        transformer(width=30, heads=4)


@pytest.mark.parametrize("make", [mlp, cnn, lambda: cnn(batch_norm=True)], ids=["mlp", "cnn", "batch norm"])
def test_digits_are_learned_in_three_epochs(make):
    model, (images, labels) = make(), digits("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for batch in range(0, len(labels), 32):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch : batch + 32]), labels[batch : batch + 32]).backward()
            optimizer.step()
    images, labels = digits("test")
    assert (model.eval()(images).argmax(1) == labels).float().mean() > 0.93


def test_the_transformer_learns_to_say_it_backwards():
    model, (inputs, targets) = transformer(), tokens(512)
    first = next_token_loss(model(inputs), targets).item()
    assert 2 < first < 4  # guessing among 11 symbols gives 2.4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        chosen = slice(64 * (step % 8), 64 * (step % 8) + 64)
        optimizer.zero_grad()
        next_token_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    assert next_token_loss(model(inputs), targets) < 0.3


# The oracle


def test_whole_batch_gradients_are_the_mean_of_those_of_equal_parts():
    model, (images, labels) = mlp(), digits("train")
    whole = whole_batch_gradients(model, (images[:64], labels[:64]), functional.cross_entropy)
    parts = [
        whole_batch_gradients(model, (images[i : i + 32], labels[i : i + 32]), functional.cross_entropy)
        for i in (0, 32)
    ]
    assert set(whole) == {name for name, _ in model.named_parameters()}
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, (parts[0][name] + parts[1][name]) / 2)


def test_whole_batch_gradients_of_tied_embeddings_count_both_uses():
    model, (inputs, targets) = transformer(), tokens(8)
    gradients = whole_batch_gradients(model, (inputs, targets), next_token_loss)
    next_token_loss(model(inputs), targets).backward()
    torch.testing.assert_close(gradients["embedding.weight"], model.embedding.weight.grad)
    assert "head.weight" not in gradients


def test_whole_batch_gradients_leave_the_model_as_it_was():
    model, batch = cnn(batch_norm=True), digits_dataset("train")[:16]
    model[1].weight.grad = torch.ones_like(model[1].weight)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        gradients = whole_batch_gradients(model, batch, functional.cross_entropy)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model[1].weight.grad, torch.ones_like(model[1].weight))
    fresh = whole_batch_gradients(cnn(batch_norm=True), batch, functional.cross_entropy)
    assert torch.equal(gradients["1.weight"], fresh["1.weight"])


def test_whole_batch_gradients_leave_out_frozen_parameters():
    model = mlp()
    model[0].weight.requires_grad_(False)
    gradients = whole_batch_gradients(model, digits_dataset()[:8], functional.cross_entropy)
    assert set(gradients) == {"0.bias", "2.weight", "2.bias"}


def test_whole_batch_gradients_of_a_model_in_ddp_have_its_own_names_and_send_nothing():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(mlp())
        called = []
        wrapped.register_comm_hook(None, lambda state, bucket: called.append(bucket))
        gradients = whole_batch_gradients(wrapped, digits_dataset()[:8], functional.cross_entropy)
    finally:
        dist.destroy_process_group()
    assert set(gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not called
