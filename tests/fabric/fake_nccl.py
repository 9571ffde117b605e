"""Communicators that behave as those of NCCL do where it hurts, without a GPU.

A call returns at once and runs in order on a thread that stands for a stream. A dead peer makes it
hang for ever. An abort completes what runs with garbage, later calls raise, and an abort waits
until each communicator of the process that has work is being aborted (as in nccl issue 1013).
Building waits for all members. Building and aborting hang where a test says so. Where NCCL may hang
since two workers use two communicators in opposite orders, the later call raises AssertionError.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tmd.core.values.model import Membership
from tmd.fabric.generations.generation import members_of
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.grouping import GroupView
from tmd.fabric.wait_timer import WaitTimer
from tmd.fabric.work import Work

Key = tuple[int, str]
"""Epoch and name of a group: a communicator."""
Launch = tuple[Key, int]
"""A collective: its communicator, and its number there."""
LOST = torch.tensor(torch.nan)


@dataclass
class Cluster:
    """All workers. What hangs ends with :meth:`end`. Thread-safe."""

    dead: set[str] = field(default_factory=set)
    hanging_builds: set[tuple[str, str]] = field(default_factory=set)
    """(worker, group)."""
    hanging_inits: set[tuple[str, str]] = field(default_factory=set)
    """The same, once all members have come to the build."""
    failing_builds: set[tuple[str, str]] = field(default_factory=set)
    hanging_aborts: set[tuple[str, str]] = field(default_factory=set)
    aborts: int = 0
    """Aborts that have ended."""
    began: set[tuple[str, str, int]] = field(default_factory=set)
    """Builds that have begun: worker, group, epoch."""
    building: set[str] = field(default_factory=set)
    overlapped: list[str] = field(default_factory=list)
    """Workers that have begun a build while another one ran that does not hang."""
    open: int = 0
    """Communicators that are built and not closed."""
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _launched: dict[str, dict[Launch, int]] = field(default_factory=lambda: defaultdict(dict))
    """By worker: its collectives, with their place in the order in which it has called them."""
    _arrived: dict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    _given: dict[Launch, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def lose(self, worker: str) -> None:
        with self.changed:
            self.dead.add(worker)
            self.changed.notify_all()

    def release(self, build: tuple[str, str]) -> None:
        """Let builds go on that hang."""
        with self.changed:
            self.hanging_builds.discard(build)
            self.hanging_inits.discard(build)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Returns whether it became true before the end of all; call it with ``changed`` held."""
        self.changed.wait_for(lambda: self.ended or condition())
        return not self.ended

    def arrives(self, key: Key, worker: str, members: tuple[str, ...]) -> bool:
        """A member builds; returns when all do."""
        with self.changed:
            self._arrived[key].add(worker)
            self.changed.notify_all()
            return self.wait_for(lambda: self._arrived[key] >= set(members))

    def launches(self, worker: str, launch: Launch) -> None:
        """A worker calls a collective. Call it with ``changed`` held."""
        mine = self._launched[worker]
        for other, theirs in self._launched.items():
            if other == worker or launch not in theirs:
                continue
            for before in mine:
                opposed = theirs.get(before, -1) > theirs[launch]
                assert not opposed, f"{worker} calls {before}, {launch}; {other} the other way"
        mine[launch] = len(mine)

    def gives(self, key: Key, number: int, worker: str, value: Tensor) -> dict[str, Tensor]:
        with self.changed:
            given = self._given[key, number]
            given[worker] = value.clone()
            self.changed.notify_all()
            return given


class FakeKind:
    """Builds the communicators of a worker. A build cannot be called off, as with NCCL."""

    def __init__(self, cluster: Cluster, worker: str) -> None:
        self._cluster, self._worker = cluster, worker
        self._owned: list[FakeNccl] = []

    def takes(self, tensor: Tensor) -> bool:
        return True

    def build(self, request: GroupRequest) -> FakeNccl:
        """Also of a group that no member has used."""
        made = FakeNccl(self._cluster, self._worker, request.view, request.membership, self._owned)
        made.initialize(request)
        self._owned.append(made)
        return made

    def end(self, within_s: float) -> tuple[str, ...]:
        return ()


class FakeNccl:
    """The communicator of one worker, and its stream."""

    def __init__(
        self,
        cluster: Cluster,
        worker: str,
        view: GroupView,
        membership: Membership,
        owned: list[FakeNccl],
    ) -> None:
        self.key = (membership.epoch, view.name)
        self._cluster, self._worker, self._owned = cluster, worker, owned
        self._members = members_of(view, membership)
        self._queue: queue.SimpleQueue[tuple[int, Tensor, Work] | None] = queue.SimpleQueue()
        self._pending = 0
        self._launched = 0
        self._aborting = False
        self._aborted = False
        self._stream = threading.Thread(target=self._run, daemon=True)
        self._stream.start()

    @property
    def backend(self) -> FakeNccl:
        return self

    def initialize(self, request: GroupRequest) -> None:
        cluster, place = self._cluster, (self._worker, self.key[1])
        if place in cluster.failing_builds:
            raise RuntimeError("unhandled system error")
        with cluster.changed:
            cluster.began.add((*place, self.key[0]))
            cluster.changed.notify_all()
            if self._worker in cluster.building:
                cluster.overlapped.append(self._worker)
            cluster.building.add(self._worker)
            cluster.wait_for(lambda: place not in cluster.hanging_builds)
        try:
            if not cluster.arrives(self.key, self._worker, self._members):
                raise RuntimeError("the test has ended")
            request.met()
            request.make_room()
            with cluster.changed:
                cluster.wait_for(lambda: place not in cluster.hanging_inits)
        finally:
            cluster.building.discard(self._worker)
        with cluster.changed:
            cluster.open += 1

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Work:
        """Sum over the members, in place; returns at once."""
        with self._cluster.changed:
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            number = self._launched
            self._cluster.launches(self._worker, (self.key, number))
            self._launched += 1
            self._pending += 1
            work = Work(tensors, WaitTimer())
            self._queue.put((number, tensors[0], work))
        return work

    def _run(self) -> None:
        cluster = self._cluster
        while (job := self._queue.get()) is not None:
            number, tensor, work = job
            given = cluster.gives(self.key, number, self._worker, tensor)
            with cluster.changed:
                cluster.changed.wait_for(partial(self._settled, given))
                whole = given.keys() >= set(self._members)
                tensor.copy_(torch.stack([*given.values()]).sum(0) if whole else LOST)
                self._pending -= 1
            work.finish()

    def _settled(self, given: dict[str, Tensor]) -> bool:
        whole = given.keys() >= set(self._members)
        return whole or self._aborted or self._cluster.ended

    def abort(self) -> None:
        cluster = self._cluster
        with cluster.changed:
            self._aborting = True
            cluster.changed.notify_all()
            if (self._worker, self.key[1]) in cluster.hanging_aborts:
                cluster.wait_for(lambda: False)
                return
            if not cluster.wait_for(self._all_abort):
                return
            self._aborted = True
            cluster.aborts += 1
            cluster.changed.notify_all()

    def _all_abort(self) -> bool:
        busy = [each for each in self._owned if each._pending and not each._aborted]
        return all(each._aborting for each in busy)

    def close(self) -> None:
        with self._cluster.changed:
            assert not self._pending or self._aborted, "it is freed while work runs in it"
            self._cluster.open -= 1
        self._queue.put(None)
