"""Holds the worker's status: several threads change it, the agent sends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from msgspec import structs
from torch import nn

from tmd.core.planning.directives import Directive
from tmd.core.values.model import Activity, Rehearsal, WorkerStatus
from tmd.core.values.shadows import noted
from tmd.core.values.snapshots import Kept
from tmd.core.worker.responses import Response, respond
from tmd.core.worker.transitions import WorkerTransition, transition
from tmd.fabric import Fabric, handshake
from tmd.trainer.session.trace import peak_rss
from tmd.trainer.state.devices import devices_of
from tmd.trainer.state.replicas import Partition, group_of
from tmd.trainer.state.roles import Role, Roles
from tmd.trainer.worker.agent import Agent

HOLDING = frozenset({Activity.TRAINING, Activity.STUCK})
"""Activities of a worker that holds a rank and has to commit its step."""


class StatusReporter:
    """``update`` is safe from any thread."""

    _agent: Agent

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._changing = threading.Lock()
        self._came = time.monotonic()
        self._fabric: Fabric | None = None
        self._replicas: Partition = ()
        self._roles = Roles(several=False)

    def open(self, agent: Agent, fabric: Fabric) -> None:
        """Begin to report, once peers can reach this worker."""
        self._agent, self._fabric = agent, fabric
        self._status = structs.replace(
            self._status,
            address=fabric.address,
            carrier=fabric.generations.carrier,
            protocol=handshake.VERSION,
        )
        agent.start()

    def current(self) -> WorkerStatus:
        """The status with current measurements."""
        fabric = self._fabric
        if fabric is None:
            return self._status
        status, came = self._status, self._came
        return structs.replace(
            status,
            stands_s=time.monotonic() - came if status.activity in HOLDING else 0.0,
            waiting=fabric.waiting,
            elastic=fabric.passes.inelastic,
            beside_obstacle=fabric.generations.beside.obstacle,
            kept_bytes=fabric.step.nbytes,
            links_opened=fabric.counters.opened,
            rss_bytes=peak_rss(),
        )

    @property
    def status(self) -> WorkerStatus:
        return self._status

    def update(
        self, event: WorkerTransition | None = None, *, now: bool = True, **changes: object
    ) -> None:
        """Change the status; report it at once, or (``now`` false) with the next heartbeat.

        Args:
            event: moves the worker to another activity, which starts without timings unless
                ``changes`` contains some.
            now: whether to wake the agent.
            changes: fields of the status.

        Raises:
            IllegalTransition: ``event`` is impossible in the current activity.
        """
        # Under the lock: no two threads may start from the same old status.
        with self._changing:
            if event is not None:
                activity = transition(self._status.activity, event)
                changes = {"timings": {}, "activity": activity, **changes}
            status = structs.replace(self._status, **changes)
            if status.epoch != self._status.epoch:
                status = structs.replace(status, entered=status.step)
            if _place(status) != _place(self._status):
                self._came = time.monotonic()
            replicas, role = self.alike(status.rank), self._roles.of(status.rank)
            self._status = structs.replace(status, replicas=replicas, role=role)
        if now:
            self._agent.tell()

    def next_response(
        self, *, under: Directive | None = None, one_run: bool = False
    ) -> tuple[Response, Directive]:
        """Wait for a directive that has a response in the current activity."""
        found = self._response(self._agent.wait_until, under, one_run=one_run)
        assert found is not None
        return found

    def next_response_within(
        self, seconds: float, *, under: Directive | None = None
    ) -> tuple[Response, Directive] | None:
        """Like :meth:`next_response`, for a limited time; ``None`` if it is over."""
        return self._response(lambda wanted: self._agent.wait_a_while(wanted, seconds), under)

    def _response(
        self,
        wait: Callable[[Callable[[Directive], bool]], Directive | None],
        under: Directive | None,
        *,
        one_run: bool = False,
    ) -> tuple[Response, Directive] | None:
        found: Response | None = None

        def concerns(directive: Directive) -> bool:
            nonlocal found
            found = respond(directive, self._status, under=under, one_run=one_run)
            return found is not None

        directive = wait(concerns)
        return None if directive is None or found is None else (found, directive)

    def registered(
        self,
        replicas: Partition,
        models: Sequence[nn.Module],
        serves: tuple[int, ...],
        roles: Roles,
    ) -> None:
        """Report which ranks have equal state, which devices hold that of this worker, and which
        ranks the built objects can serve; empty for any. ``roles``: of all ranks, as far as known.
        """
        self._replicas, self._roles = replicas, roles
        self.update(devices=devices_of(models), serves=serves)

    def alike(self, rank: int | None) -> tuple[int, ...]:
        """Ranks whose state equals that of ``rank``, including it, as far as known."""
        return () if rank is None or not self._replicas else group_of(self._replicas, rank)

    def report_rehearsal(self, rank: int, verdict: Rehearsal, roles: Sequence[Role] = ()) -> None:
        """Report ``verdict`` on ``rank`` and on ranks of its role. ``roles``: those of all ranks,
        if newer than the known ones."""
        structures = [role.structure for role in roles or self._roles.known]
        self.update(rehearsed=noted(self._status.rehearsed, verdict, rank, structures), now=False)

    def report_snapshots(self, kept: tuple[Kept, ...]) -> None:
        """Report the snapshots in this worker's memory."""
        self.update(kept=kept, now=False)

    def report_armed(self, epoch: int, plan: str, refusal: str) -> None:
        """Report that the worker is armed for ``epoch`` of ``plan``, or for nothing (0), and why it
        cannot be."""
        self.update(armed=epoch, plan=plan, detail=refusal, timings={})


def _place(status: WorkerStatus) -> tuple[bool, int, int]:
    return status.activity in HOLDING, status.epoch, status.step
