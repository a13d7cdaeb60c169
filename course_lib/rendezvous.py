"""How ranks find each other: `init_process_group()` may be called again after a clean-up.

A second group looks into the same store as the first, and would find the addresses that its ranks left there.
Started by hand, each `init_process_group()` opens a store of its own; a job here, as under torchrun, has one
store for all its life. So each time a rank joins, it is given a corner of the store that nobody has used.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any


def allow_rejoining() -> None:
    """In a rank: give every `init_process_group()` after the first a corner of the store to itself."""
    from torch.distributed import PrefixStore

    # torch.distributed has a function of the module's name, which hides it.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", {})
    if "env" not in handlers:
        return
    find, times = handlers["env"], itertools.count()

    def find_again(*args: Any, **kwargs: Any) -> Iterator[tuple]:
        for store, rank, world_size in find(*args, **kwargs):
            time = next(times)
            yield (PrefixStore(f"joined_{time}", store) if time else store), rank, world_size

    handlers["env"] = find_again
