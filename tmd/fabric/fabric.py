"""The endpoint of one worker process; the rest of the runtime uses only this class."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from math import inf

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric import coalescing
from tmd.fabric.admission import Admission
from tmd.fabric.control import Control
from tmd.fabric.counters import CallCounter, LinkCounters
from tmd.fabric.dial import PATIENCE_S, Caller
from tmd.fabric.epoch_view import PROBE_PERIOD, EpochContext, EpochView, LinkKey, Links, put
from tmd.fabric.frame import SHIFT, VOTE
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.inner import BuildTime
from tmd.fabric.grouping import Groups, GroupTable, GroupView, Participant
from tmd.fabric.handshake import LinkHello, LinkPurpose, Seal
from tmd.fabric.link import Link
from tmd.fabric.link_watch import LinkWatch
from tmd.fabric.links_ahead import LinksAhead
from tmd.fabric.listener import Listener
from tmd.fabric.passes import Passes
from tmd.fabric.rank_remap import turn
from tmd.fabric.raw import RawLinks
from tmd.fabric.sandbox import Neutral, OutputSource, Sandbox
from tmd.fabric.tap import Tap
from tmd.fabric.unfinished_step import UnfinishedStep
from tmd.fabric.wait_timer import WaitTimer

DRAIN, CLOSE_S = 60.0, 5.0


class Fabric:
    """Listener, links, groups and current membership of ``worker``. ``close`` ends its threads.

    It holds a rank of a membership, or is in the sandbox; it starts as neither.
    """

    def __init__(
        self, worker: str, key: bytes, *, host: str = "127.0.0.1", patience_s: float = PATIENCE_S
    ) -> None:
        self.worker = worker
        self.counters = LinkCounters()
        self.tap: Tap | None = None
        self.generations = Generations()
        self.calls, self.blocked = CallCounter(), WaitTimer(lambda: self.step.suspended)
        self.passes = Passes(lambda: self.standing)
        self._sandbox: Sandbox | None = None
        self._groups = Groups()
        self.step = UnfinishedStep(self._groups, self.calls)
        self._rank_in_torch: int | None = None
        self._caller = Caller(worker, key, patience_s)
        self.raw = RawLinks()
        self._admission = Admission(self.raw, self.counters)
        self._ahead = LinksAhead(self._caller, self._admission)
        self._control = Control()
        self._watch = LinkWatch(lambda: self.standing)
        self._of_epochs = EpochContext(self._caller, self.counters, self._watch, self._poisoned)
        self._listener = Listener(host, key, worker, self._admit)
        self.address = f"{host}:{self._listener.port}"

    @property
    def standing(self) -> EpochView | None:
        """Rank and links in the current epoch; ``None`` in the sandbox."""
        return self._admission.standing

    @property
    def sandboxed(self) -> Sandbox | None:
        return self._sandbox

    @property
    def membership(self) -> Membership | None:
        return standing.membership if (standing := self.standing) is not None else None

    @property
    def rank(self) -> int | None:
        """The rank that it holds, or assumes in the sandbox, as the script sees it."""
        if self.passes.shrunk:
            return self.passes.acting
        place = self.standing or self._sandbox
        return None if place is None else place.rank

    @property
    def size(self) -> int | None:
        place = self.standing or self._sandbox
        return None if place is None else place.size

    @property
    def waiting(self) -> bool:
        """Whether a thread waits for other workers, and not for this worker's own device."""
        called = self._control.busy or self.blocked.level > 0
        return self._groups.waiting or (called and self.blocked.own == 0)

    @property
    def quiet(self) -> bool:
        """Whether no operation runs or is queued, and no message is expected."""
        return self._groups.quiet

    def groups(self) -> tuple[GroupView, ...]:
        """The groups of the rank that it holds or assumes."""
        return self._groups.views

    def groups_of(self, rank: int) -> tuple[GroupView, ...]:
        """The groups as they would be for ``rank``."""
        return self._groups.of(rank)

    @property
    def built(self) -> tuple[GroupView, ...]:
        """The groups as the script of this process has built them."""
        return self._groups.built

    @property
    def table(self) -> GroupTable:
        """The groups of every rank; empty until :meth:`learn`."""
        return self._groups.table

    def learn(self, table: GroupTable) -> None:
        """Store ``table``: from now on the groups follow the rank that this worker assumes."""
        self._groups.table = table

    def _turn(self, *, changed: bool) -> None:
        """Update torch if the rank or the groups (``changed``) differ from before."""
        before, self._rank_in_torch = self._rank_in_torch, self.rank
        moved = before != self._rank_in_torch
        if changed or moved:
            turn(self._groups, moved=moved, ran=self.calls.ran)

    # --- change of epoch -----------------------------------------------------------------------

    def pass_to(self, generations: Generations) -> None:
        """Let inner groups carry collectives, before there are groups or a rank."""
        self.generations, self._watch.enabled = generations, True

    def enter(self, membership: Membership, rank: int, *, mid_step: bool = False) -> None:
        """Assume ``rank`` of ``membership`` without preparation.

        All older links are closed and the poison is cleared. ``mid_step``: the operations of this
        rank's suspended step keep waiting. Raises ValueError if the epoch is not newer than this
        worker's last one, and LinkError if an operation of the last one never ends.
        """
        if membership.epoch <= self._admission.epoch:
            raise ValueError(f"epoch {membership.epoch} is not newer than {self._admission.epoch}")
        if (old := self.standing) is not None:
            old.close_silently()  # it is not a fault, but waiting threads must wake up
        self.step.at_rest(DRAIN) if mid_step else self.drain()
        self.generations.enter(membership)
        if self._watch.enabled:  # a loss before the first vote must be noticed, too
            self._ahead.dial_votes(membership, rank)
        self._turn(changed=self._replace(membership, rank, {}))

    def prepare(
        self, membership: Membership, rank: int, *, timeout: float, cancel: Callable[[], bool]
    ) -> int:
        """As a joiner, open the links of ``rank`` in a future ``membership`` from the sandbox.

        Returns how many. On LinkError or ``cancel`` the opened ones are closed; raises LinkError.
        """
        if self._sandbox is None:
            raise ValueError("only a worker in the sandbox can prepare to join")
        self.sandbox(self._sandbox.source, rank, membership.size)
        return self._ahead.open_all(self.groups_of(rank), membership, rank, timeout, cancel)

    def prepare_recovery(
        self, membership: Membership, rank: int, *, timeout: float, cancel: Callable[[], bool]
    ) -> int:
        """In a recovery, open the links of ``rank`` that this worker dials; return how many.

        A link that fails is left to the first operation. Inner groups are built in the background.
        """
        views = self.groups_of(rank)
        self.generations.prepare(views, membership, when=BuildTime.ALONE)
        return self._ahead.dial(views, membership, rank, timeout, cancel)

    def switch(self, membership: Membership, rank: int | None) -> None:
        """At a step boundary, continue in ``membership`` as ``rank``, or go to the sandbox.

        Links between members of both epochs stay, with the messages in flight on them. Prepared
        links are adopted, all others are closed.
        """
        self.drain()
        old = self.standing
        if rank is None:
            self.sandbox(Neutral(), old.rank if old is not None else 0, membership.size)
            return
        with self._admission.lock:
            lasts = old is not None and not old.poisoned and old.rank == rank
            # Those of a poisoned epoch are severed. The operations of the next one open others.
            kept = old.hand_over() if old is not None and not old.poisoned else {}
            gone = self._admission.hung_up(membership) if self._watch.enabled else []
            changed = self._replace(membership, rank, kept, lasts=lasts)
        self._turn(changed=changed)
        self._watch.missed(self._caller.unanswered(gone, PROBE_PERIOD))
        if why := self.generations.follow(membership, lambda: self.poisoned):
            self.poison(why)
        elif self.poisoned:  # perhaps before the generations of this epoch were used
            self.generations.lose(membership.epoch)

    def joiner_gone(self, later: Membership) -> bool:
        """Whether a worker that opened links for the ``later`` epoch is gone."""
        return bool(self._caller.unanswered(self._admission.hung_up(later), PROBE_PERIOD))

    def has_in_flight(self, later: Membership) -> bool:
        """Whether a message to or from a rank that moves in ``later`` is in flight."""
        if (standing := self.standing) is None:
            return False
        moved = standing.membership.moved(later)
        return any(group.has_in_flight(standing, moved) for group in self._groups)

    @property
    def parked(self) -> int:
        """Number of links that wait for a later epoch."""
        return self._admission.waiting

    def discard(self, later: Membership) -> None:
        """Drop the preparations for ``later``."""
        self._admission.discard(later.epoch)
        self.generations.discard(later)

    def sandbox(self, source: OutputSource, rank: int, size: int) -> None:
        """Stop communicating: outputs come from ``source``; groups report ``rank`` of ``size``."""
        with self._admission.lock:
            old, self._admission.standing = self._admission.standing, None
            self._sandbox = Sandbox(source, rank, size)
        if old is not None:
            old.close_silently()
            self.step.leave_epoch(old.epoch)
            self._groups.abandon(old)
        self.drain()
        self.generations.leave()
        if old is not None:
            old.close()
        self._turn(changed=self._groups.assume(rank))

    def _replace(
        self, membership: Membership, rank: int, kept: Links, *, lasts: bool = False
    ) -> bool:
        """Return whether the groups changed; the caller must call :meth:`_turn`.

        ``lasts``: messages of the previous epoch count in the new one.
        """
        workers = {m.worker for m in membership.members}
        with self._admission.lock:
            old = self._admission.standing
            links = dict(kept)
            for key, link in self._admission.take(membership.epoch).items():
                if (surplus := put(links, key, link)) is not None:
                    surplus.close()
            for key in [k for k in links if k.worker not in workers]:
                self._watch.leaves(key.group, links[key])  # it may still be in its last step
                links.pop(key).close()
            standing = EpochView(membership, rank, links, self._of_epochs)
            if lasts and old is not None:
                standing.since = old.since
            # Before new links are admitted: they go to groups by name, into the same table.
            changed = self._groups.assume(rank)
            fresh = [(key, link) for key, link in links.items() if kept.get(key) is not link]
            self._admission.standing = standing
            self._admission.epoch = membership.epoch
            self.passes.end()
            self._sandbox = None
        self.step.leave_epoch(membership.epoch - 1)
        if old is not None:
            if lasts:
                self._groups.carry(old, standing)
            else:
                self._groups.abandon(old)
            old.close()
        for key, link in fresh:
            self._attach(key, link)
        return changed

    def settle(self) -> None:
        """Wait for the collectives called so far. Only then does :attr:`poisoned` show whether one
        of them broke."""
        self._groups.rest()
        self._groups.settle()

    def drain(self) -> None:
        """Wait for all operations called so far. Raises LinkError if one never ends."""
        self._groups.drain(DRAIN)

    # --- abandoning the epoch ------------------------------------------------------------------

    def poison(self, reason: str) -> None:
        """Abandon the current epoch: pending operations complete without error, links close."""
        if (standing := self.standing) is not None:
            standing.poison(reason)

    @property
    def poisoned(self) -> bool:
        return (standing := self.standing) is not None and standing.poisoned

    @property
    def poison_reason(self) -> str:
        return standing.reason if (standing := self.standing) is not None else ""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Workers whose link broke first; empty if the poison came from :meth:`poison`."""
        return standing.suspects if (standing := self.standing) is not None else ()

    def _poisoned(self, standing: EpochView) -> None:
        self.step.broke(standing.epoch)
        self.generations.lose(standing.epoch)
        self._groups.abandon(standing)

    # --- the runtime's own messages among the ranks ----------------------------------------------

    def reduce_min(self, values: Sequence[int]) -> tuple[int, ...]:
        """The vote: element-wise minimum over the world. Raises LinkError if it broke."""
        coalescing.end_all()
        self._groups.rest()
        if self._sandbox is not None:
            return self._sandbox.source.vote(values)
        result = self._control.reduce_min(self._held(), values)
        if self.tap is not None:
            self.tap.voted(result)
        return result

    def shift(self, payload: bytes, offset: int) -> bytes:
        """Send to rank + offset and receive from rank - offset. Raises LinkError if it broke."""
        if self._sandbox is not None:
            return self._sandbox.source.shift(payload, offset)
        received = self._control.shift(self._held(), payload, offset)
        if self.tap is not None:
            self.tap.shifted(offset, received)
        return received

    def _held(self) -> EpochView:
        if (standing := self.standing) is None:
            raise LinkError(f"{self.worker} holds no rank")
        return standing

    def connect(self, member: Member, purpose: str, *, timeout: float) -> Link:
        """Open an authenticated stream to ``member``. Raises LinkError. The caller closes it."""
        return self._caller.dial(member, purpose, LinkPurpose.RAW, -1, timeout=timeout)

    def accept(
        self, purpose: str, *, timeout: float = inf, cancel: Callable[[], bool] | None = None
    ) -> Link:
        """The accepting side of :meth:`connect`. Raises LinkError. The caller closes the link."""
        return self.raw.accept(purpose, timeout=timeout, cancel=cancel)

    def refusal(self, member: Member, *, timeout: float) -> str:
        """Why ``member`` refuses links of this worker; empty if it does not, or does not answer."""
        return self._caller.refusal(member, timeout=timeout)

    def _admit(self, hello: LinkHello, sock: socket.socket, seal: Seal) -> None:
        # Atomically, or a group created at this moment would attach the link a second time.
        with self._admission.lock:
            if (placed := self._admission.admit(hello, sock, seal)) is not None:
                self._attach(*placed)

    def _attach(self, key: LinkKey, link: Link) -> None:
        if key.purpose == LinkPurpose.MESSAGES and (group := self._groups.named(key.group)):
            group.attach(link)

    # --- groups --------------------------------------------------------------------------------

    def join(self, group: Participant) -> None:
        """Add a new group: it is part of every epoch from now on."""
        name = group.view.name
        if name in (VOTE, SHIFT) or self._groups.named(name) is not None:
            raise ValueError(f"there is already a group {name!r}")
        with self._admission.lock:
            self._groups.add(group)
            early = self.standing.member_links() if self.standing is not None else ()
            for key, link in list(early):
                if key.group == name:
                    self._attach(key, link)

    def destroy_group(self, group: Participant) -> list[Link]:
        """Remove a destroyed group and sever its links. Returns them: the caller closes them once
        none of its operations runs."""
        standing = self.standing if self._groups.remove(group) else None
        return [] if standing is None else standing.drop(group.view.name)

    def close(self, *, orderly: bool = True) -> None:
        """Stop listening, close all links and end the groups; idempotent. Not ``orderly``: peers
        that watch the links take it for a loss."""
        self._listener.close()  # first: no later caller may reach this worker
        self.step.give_up()
        standing = self.standing
        self._watch.close()
        ended: tuple[str, ...] = ()
        if standing is not None:
            if orderly and not standing.poisoned:
                ended = self._groups.settle_within(CLOSE_S)  # peers may need the last operations
            standing.close_silently(orderly=orderly)
            self._groups.abandon(standing)
        self.generations.close(CLOSE_S, ended)
        self._groups.end(CLOSE_S)
        if standing is not None:
            standing.close()
        self._admission.discard_all()
        self.raw.close()
