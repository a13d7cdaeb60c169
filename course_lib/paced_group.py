"""A process group with gloo underneath, in which no message is sooner than a link would carry it.

It carries every message for real over a gloo group of its own: collectives through a `CollectiveQueue`, send
and recv through `Messages`. The groups of a rank share its link; two collectives of different groups that are
under way at the same time do not see each other on it. Where the link holds nothing back, everything goes
straight to gloo and is only counted.
"""

# torch's stubs give the collectives overloads for call forms that torch.distributed itself never uses.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from course_lib import clock, spans
from course_lib.link import plan
from course_lib.paced_messages import Messages
from course_lib.paced_queue import Collective, CollectiveQueue
from course_lib.paced_rank import PacedRank, total_bytes
from course_lib.paced_work import TIMER, PacedWork

BACKEND = "paced"
SHUTDOWN_SECONDS = 10.0

Tensor = torch.Tensor
live: weakref.WeakSet[PacedGroup] = weakref.WeakSet()


class PacedGroup(dist.ProcessGroup):
    """A process group over gloo whose transfers take as long as on the rank's link.

    ranks: the job's rank of each of the group's ranks. The collectives bear the names that torch.distributed
    and its C++ (DDP's reducer, the functional collectives) call them by; `opts` may come by keyword.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: list[int],
        timeout: timedelta,
        name: str,
        shared: PacedRank,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._rank, self._size, self._name = rank, len(ranks), name
        self._gloo = ProcessGroupGloo(store, rank, len(ranks), timeout)
        # The bindings of a ProcessGroup have collectives that those of a bare backend lack.
        self._inner = dist.ProcessGroup(store, rank, len(ranks))
        self._inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._shared = shared
        self._messages = Messages(self._inner, shared, rank, ranks)
        self._queue = CollectiveQueue(name, self._inner, shared, rank, ranks)
        self._closed = False
        live.add(self)

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def getBackendName(self) -> str:
        """The backend's name."""
        return BACKEND

    name = _get_backend_name = getBackendName
    getSize, getRank = size, rank

    @property
    def group_name(self) -> str:
        """The name torch.distributed gave the group."""
        return self._name

    pg_name = group_name

    def set_timeout(self, timeout: timedelta) -> None:
        """How long gloo waits for a peer before it gives up."""
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """End the group's thread and close its connections; called by `destroy_process_group`."""
        self.close(SHUTDOWN_SECONDS)

    def abort(self) -> None:
        """The same without waiting for what is under way."""
        self.close(0.0)

    def close(self, patience: float) -> None:
        """Let what is queued finish for up to `patience` seconds, then close."""
        self._closed = True
        self._queue.close(patience, self._gloo.abort)
        live.discard(self)
        if not live:
            TIMER.stop()

    def _start(
        self,
        name: str,
        call: Callable[..., dist.Work],
        *args: Any,
        size: int = 0,
        payload: int | None = None,
        outputs: Sequence[Any] = (),
        root: int = 0,
    ) -> dist.Work:
        """Count a collective, and carry it by `call(*args)`.

        size: as `link.plan` takes it. payload: what this rank hands over, where that is not `size`.
        """
        if self._closed:
            raise RuntimeError(f"{name}: the process group {self._name!r} has been destroyed")
        planned = plan(name, size, self._rank, self._size, root)
        payload = size if payload is None else payload
        self._shared.ledger.count(name, payload, planned.messages, planned.bytes_sent, planned.bytes_received)
        if not self._shared.link.holds_back:
            return call(*args)
        work = PacedWork(list(outputs), settles=name == "barrier")
        self._queue.put(
            Collective(
                name,
                payload,
                planned,
                clock.current().now(),
                lambda: call(*args),
                work,
                spans.current_label(),
                spans.current_step(),
            )
        )
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """All-reduce, a ring."""
        opts, size = opts or AllreduceOptions(), total_bytes(tensors)
        return self._start("all_reduce", self._inner.allreduce, tensors, opts, size=size, outputs=tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """All-reduce of several tensors, as if they were one."""
        opts, size = opts or AllreduceCoalescedOptions(), total_bytes(tensors)
        call = self._inner.allreduce_coalesced
        return self._start("all_reduce", call, tensors, opts, size=size, outputs=tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Broadcast from `opts.rootRank`, a pipelined tree."""
        opts, size = opts or BroadcastOptions(), total_bytes(tensors)
        root, call = opts.rootRank, self._inner.broadcast
        payload = size if self._rank == root else 0
        return self._start(
            "broadcast", call, tensors, opts, size=size, payload=payload, outputs=tensors, root=root
        )

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce to `opts.rootRank`, a pipelined tree."""
        opts, size = opts or ReduceOptions(), total_bytes(tensors)
        root, call = opts.rootRank, self._inner.reduce
        return self._start("reduce", call, tensors, opts, size=size, outputs=tensors, root=root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """All-gather into lists, a ring."""
        return self._all_gather(self._inner.allgather, outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """All-gather of several tensors, as if they were one."""
        return self._all_gather(self._inner.allgather_coalesced, outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """All-gather into one tensor."""
        opts, mine = opts or AllgatherOptions(), total_bytes([input])
        call, size = self._inner.all_gather_single, mine * self._size
        return self._start("all_gather", call, output, input, opts, size=size, payload=mine, outputs=[output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """All-gather of several tensors, each into one, as if they were one."""
        return self._all_gather(self._inner.all_gather_single_coalesced, outputs, inputs, opts)

    def _all_gather(
        self, call: Callable[..., dist.Work], outputs: Sequence[Any], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        opts, mine = opts or AllgatherOptions(), total_bytes(inputs)
        size = mine * self._size
        given = outputs[0] if len(outputs) == 1 and not isinstance(outputs[0], Tensor) else outputs
        return self._start("all_gather", call, outputs, inputs, opts, size=size, payload=mine, outputs=given)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather to `opts.rootRank`, whose ingress takes one message after the other."""
        opts, size = opts or GatherOptions(), total_bytes(inputs)
        root, given = opts.rootRank, outputs[0] if outputs else []
        return self._start(
            "gather", self._inner.gather, outputs, inputs, opts, size=size, outputs=given, root=root
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Scatter from `opts.rootRank`, whose egress sends one message after the other."""
        opts, size, payload = opts or ScatterOptions(), total_bytes(outputs), total_bytes(inputs)
        root, call = opts.rootRank, self._inner.scatter
        return self._start(
            "scatter", call, outputs, inputs, opts, size=size, payload=payload, outputs=outputs, root=root
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce-scatter of lists, a ring."""
        opts, size = opts or ReduceScatterOptions(), total_bytes(inputs)
        call = self._inner.reduce_scatter
        return self._start("reduce_scatter", call, outputs, inputs, opts, size=size, outputs=outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce-scatter of one tensor."""
        opts, size = opts or ReduceScatterOptions(), total_bytes([input])
        call = self._inner.reduce_scatter_single
        return self._start("reduce_scatter", call, output, input, opts, size=size, outputs=[output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce-scatter of several tensors, as if they were one."""
        opts, size = opts or ReduceScatterOptions(), total_bytes(inputs)
        call = self._inner.reduce_scatter_single_coalesced
        return self._start("reduce_scatter", call, outputs, inputs, opts, size=size, outputs=outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """All-to-all of one tensor, pairwise; the time is that of equal parts."""
        opts, size, call = opts or AllToAllOptions(), total_bytes([input]), self._inner.all_to_all_single
        args = (output, input, output_sizes, input_sizes, opts)
        return self._start("all_to_all", call, *args, size=size, outputs=[output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """All-to-all of lists, pairwise; the time is that of equal parts."""
        opts, size = opts or AllToAllOptions(), total_bytes(inputs)
        return self._start(
            "all_to_all", self._inner.alltoall, outputs, inputs, opts, size=size, outputs=outputs
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for everyone, by dissemination."""
        return self._start("barrier", self._inner.barrier, opts or BarrierOptions())

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        """Send one tensor."""
        return self._messages.send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        """Receive one tensor."""
        return self._messages.recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive one tensor from any rank."""
        return self._messages.recv_anysource(tensors, tag)

    def _start_coalescing(self, device: torch.device) -> NoReturn:
        """Not there, as on gloo: use the coalesced collectives."""
        raise NotImplementedError("the paced backend, like gloo, cannot coalesce collectives of one device")

    # The names before torch 2.13, which its C++ and older callers still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
