"""Small real data and models: something true to train, that loads at once.

Data: `digits`, scikit-learn's handwritten digits, and `tokens`, sequences to be said backwards. Models:
`mlp`, `cnn` and `transformer`. The same arguments give the same data and the same first weights in every
process. `whole_batch_gradients` is what data-parallel gradients must equal: one process on the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

CLASSES = 10
PIXELS = 64
# Divisible by 2, 3, 4, 5 and 8 ranks; the 357 images that remain for testing are not, which chapter 06 uses.
TRAINING_IMAGES = 1440
IGNORED = -100  # the target that cross_entropy leaves out


def _digits_table() -> np.ndarray:
    """The 1797 images, float32 of shape (1797, 65): 64 pixels from 0 to 16, then the label."""
    # Importing scikit-learn takes 1 to 2 s, in every rank. Its file of digits takes 10 ms.
    package = importlib.util.find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",", dtype=np.float32)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).astype(np.float32)


def digits(split: str | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Handwritten digits: images, float32 of shape (N, 64) from 0 to 1, and labels, int64 of shape (N,).

    split: "train" (N = 1440), "test" (N = 357), or None for all 1797 in their original order. seed: which
    images are in which split, and in what order. Raises ValueError for another split.
    """
    table = torch.from_numpy(_digits_table())
    images, labels = table[:, :PIXELS] / 16, table[:, PIXELS].long()
    if split is None:
        return images, labels
    if split not in ("train", "test"):
        raise ValueError(f'split={split!r} is not there. Use "train", "test", or None for all images.')
    # RandomState's streams never change, so that the split is the same with every version of everything.
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    chosen = order[:TRAINING_IMAGES] if split == "train" else order[TRAINING_IMAGES:]
    return images[chosen], labels[chosen]


def digits_dataset(split: str | None = None, seed: int = 0) -> TensorDataset:
    """`digits` as a data set whose items are (image, label)."""
    return TensorDataset(*digits(split, seed))


def tokens(count: int = 256, length: int = 6, vocabulary: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences to be said backwards: inputs and targets, both int64 of shape (count, 2 * length).

    Each sequence is `length` random symbols, a separator (the symbol `vocabulary - 1`), and the same symbols
    backwards. A target is the symbol that comes next. Those that cannot be known are -100, which
    `cross_entropy` leaves out; every sequence has `length` that count, so that a mean over ranks is a mean.
    """
    symbols = np.random.RandomState(seed).randint(0, vocabulary - 1, size=(count, length))
    separator = np.full((count, 1), vocabulary - 1)
    sequences = torch.from_numpy(np.concatenate([symbols, separator, symbols[:, ::-1]], axis=1)).long()
    inputs, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].clone()
    targets[:, :length] = IGNORED
    return inputs, targets


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of logits (count, positions, vocabulary) and targets (count, positions)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class SlowDataset(Dataset):
    """A data set that takes `seconds` longer for each item, as reading and decoding a file would."""

    def __init__(self, dataset: Dataset, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds={seconds!r} is before now. Give 0 or more seconds an item.")
        self.dataset = dataset
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> object:
        time.sleep(self.seconds)
        return self.dataset[index]


@contextlib.contextmanager
def _weights_from(seed: int | None) -> Iterator[None]:
    """Draw first weights from `seed`, leaving the global generator as it was; None draws from that one."""
    if seed is None:
        yield
        return
    state = torch.get_rng_state()
    # torch.manual_seed would seed the GPUs' generators as well, which nobody asked for.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def mlp(
    hidden: int | Sequence[int] = (64,), inputs: int = PIXELS, outputs: int = CLASSES, seed: int | None = 0
) -> nn.Sequential:
    """Linear layers with ReLU between them, from (N, inputs) to (N, outputs).

    hidden: the width of each hidden layer, or one number for a single one. seed: of the first weights; None
    draws them from the global generator, as any other module does.
    """
    widths = [inputs, *([hidden] if isinstance(hidden, int) else hidden), outputs]
    layers: list[nn.Module] = []
    with _weights_from(seed):
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int = 16, batch_norm: bool = False, seed: int | None = 0) -> nn.Sequential:
    """Two convolutions and a linear layer for digits, from (N, 64) to (N, 10).

    batch_norm: follow each convolution by BatchNorm2d, whose statistics are of the local batch alone: a rank
    then is not one process on the whole batch. seed: as for `mlp`.
    """
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    with _weights_from(seed):
        for before, after in ((1, channels), (channels, 2 * channels)):
            layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(after))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(2 * channels * 2 * 2, CLASSES)]
    return nn.Sequential(*layers)


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP, each added to its input, from (N, L, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder whose output layer is its embedding: one weight, used first and last.

    From tokens, int64 of shape (N, L), to logits (N, L, vocabulary). `parameters()` yields the shared weight
    once. Its gradient is complete only when backward has come back to the first layer.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        # As an output layer, a weight of the embedding's usual size 1 would start far too sure of itself.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position(places))))


def transformer(
    vocabulary: int = 12,
    width: int = 32,
    heads: int = 4,
    layers: int = 2,
    positions: int = 64,
    seed: int | None = 0,
) -> Transformer:
    """A small transformer with tied embeddings, for `tokens`. seed: as for `mlp`."""
    if width % heads:
        raise ValueError(f"width={width} cannot be shared by {heads} heads. Give a multiple of heads.")
    with _weights_from(seed):
        return Transformer(vocabulary, width, heads, layers, positions)


def whole_batch_gradients(
    model: nn.Module, batch: Sequence[Tensor], loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """The gradients that one process gets from the whole batch, by parameter name.

    batch: (inputs, targets). loss_fn(outputs, targets) gives one number. Works on a copy: the model's own
    gradients, buffers and DDP's hooks are left alone. For a model in DDP, names are those of the module it
    wraps. Parameters that get no gradient (frozen, or unused) are not in the answer.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    alone = copy.deepcopy(inner)
    alone.zero_grad()
    inputs, targets = batch
    with torch.enable_grad():
        loss_fn(alone(inputs), targets).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
