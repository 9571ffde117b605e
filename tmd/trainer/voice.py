"""What this worker says of itself: one status, told by the agent, changed from two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from msgspec import structs
from torch import nn

from tmd.core.model import Activity, WorkerStatus
from tmd.core.snapshots import Kept
from tmd.fabric import Fabric
from tmd.trainer.agent import Agent
from tmd.trainer.devices import devices_of
from tmd.trainer.replicas import Partition, group_of
from tmd.trainer.trace import peak_rss


class Voice:
    """Holds the status. ``say`` is safe from any thread."""

    _agent: Agent

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._changing = threading.Lock()
        self._came = time.monotonic()
        self._fabric: Fabric | None = None
        self._replicas: Partition = ()

    def open(self, agent: Agent, fabric: Fabric) -> None:
        """Begin to tell, now that peers can reach this worker."""
        self._agent, self._fabric = agent, fabric
        self._status = structs.replace(self._status, address=fabric.address)
        agent.start()

    def current(self) -> WorkerStatus:
        """The status with what is measured at this moment."""
        fabric = self._fabric
        if fabric is None:
            return self._status
        status, came = self._status, self._came
        return structs.replace(
            status,
            stands_s=time.monotonic() - came if status.activity is Activity.TRAINING else 0.0,
            waiting=fabric.waiting,
            links_opened=fabric.counters.opened,
            rss_bytes=peak_rss(),
        )

    @property
    def status(self) -> WorkerStatus:
        return self._status

    def say(self, activity: Activity | None = None, *, now: bool = True, **changes: object) -> None:
        """Change the status; tell it at once, or (``now`` false) with the next heartbeat.

        A new activity starts with no timings of the one before unless they are given.
        """
        if activity is not None:
            changes = {"timings": {}, "activity": activity, **changes}
        # A change must not be lost to one that another thread makes from an older status.
        with self._changing:
            status = structs.replace(self._status, **changes)
            if _place(status) != _place(self._status):
                self._came = time.monotonic()
            self._status = structs.replace(status, replicas=self._alike(status.rank))
        if now:
            self._agent.tell()

    def registered(
        self, replicas: Partition, models: Sequence[nn.Module], serves: tuple[int, ...]
    ) -> None:
        """Which ranks have equal state is known now, where this one's lies, and which ranks what
        is built here ``serves``; empty for any."""
        self._replicas = replicas
        self.say(devices=devices_of(models), serves=serves)

    def _alike(self, rank: int | None) -> tuple[int, ...]:
        return () if rank is None or not self._replicas else group_of(self._replicas, rank)

    def tell_kept(self, kept: tuple[Kept, ...]) -> None:
        """Which copies of states are in this worker's memory."""
        self.say(kept=kept, now=False)

    def tell_armed(self, epoch: int, plan: str) -> None:
        """Armed for ``epoch`` of ``plan``, or for nothing (0); what was timed before is over."""
        self.say(armed=epoch, plan=plan, timings={})


def _place(status: WorkerStatus) -> tuple[Activity, int, int]:
    return status.activity, status.epoch, status.step
