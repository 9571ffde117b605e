"""Carrying the whole state of a rank between two workers while it stands still."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from tmd.core.planning.directives import Arm, Directive, Sync
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Move
from tmd.fabric import (
    Fabric,
    GroupView,
    Link,
    Neutral,
    look_ahead,
    packed,
    packed_row,
    unpacked,
)
from tmd.trainer.protocol.copies import StateCopy
from tmd.trainer.protocol.offers import Offer, StateHeader
from tmd.trainer.protocol.step_vote import gather
from tmd.trainer.protocol.take_over import AdvanceToNextLoop, Takeover, state_purpose
from tmd.trainer.state.compatibility import (
    bucket_layout,
    bucket_mismatch,
    group_mismatch,
    part_mismatch,
)
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition, group_of
from tmd.trainer.state.roles import (
    RebuildRequired,
    Role,
    Roles,
    contradiction,
    part_of,
    structure_of,
)
from tmd.trainer.state.state import Layouts, Registry, mismatch
from tmd.trainer.state.units import BUFFERS, Units
from tmd.trainer.state_transfer import transfer
from tmd.trainer.state_transfer.early_digest import EarlyDigest
from tmd.trainer.state_transfer.parameter_resync import ParameterResync
from tmd.trainer.state_transfer.verification import StateVerification

CONNECT_TIMEOUT_S = 10.0

log = logging.getLogger("tmd.trainer")


class StateTransfer:
    """For the main thread, but for ``offer`` and ``cancel_unless``."""

    def __init__(
        self,
        fabric: Fabric,
        registry: Registry,
        units: Units,
        wrapped: list[nn.Module],
        local: LocalState,
        *,
        several: bool = False,
    ) -> None:
        """``several``: the script can build other roles, too."""
        self._fabric = fabric
        self._registry = registry
        self._wrapped = wrapped
        self._local = local
        self._units = units
        self.early = EarlyDigest(units)
        self.verification = StateVerification()
        self.seeds: tuple[int, ...] = ()
        """Base seed of every rank."""
        self.feed: Feed | None = None
        self._errand: tuple[Directive, Link] | None = None
        self.layouts: Layouts = registry.collect()[0]
        """What the state looked like when it was registered."""
        self._buckets = ""
        self.roles = Roles(several=several)
        self.resync = ParameterResync(registry, fabric)
        self._started_over: Sync | None = None

    def start_over(
        self, directive: Sync, offered: Offer | None = None, *, survives: bool = False
    ) -> str:
        """Where no step was ever committed, all build again: no one must be further than another.

        In its first step a pipeline settles what is sent in all later ones. Some may have got that
        far when it broke; a joiner has, in its shadow iterations. Returns why this worker cannot
        be the rank with what is ``offered``; empty if it can, or need not be asked.

        Args:
            duty: once for each.
            offered: what is known of the job; left out by who knows it.
            survives: this worker has the state to go on from.

        Raises:
            OtherRole: it was not done yet for ``directive``.
        """
        if not self.roles.several or directive.resume != 0 or self._started_over == directive:
            return ""
        if offered is not None:
            if refusal := self._other_groups(directive.rank, offered):
                return refusal
            self.learn(offered)
        self._started_over = directive
        raise RebuildRequired(directive.rank, cold=True, keeps=survives)

    def taken(self) -> tuple[Layouts, list[Tensor]]:
        """A copy of the whole state, in the memory of the host."""
        layouts, tensors = self._registry.collect()
        return layouts, [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    @torch.no_grad()
    def give(self, layouts: Layouts, tensors: Sequence[Tensor]) -> None:
        """Put a state in place that was taken before others were built.

        Raises:
            StateMismatch: they are built otherwise, so that it would be lost.
        """
        if difference := mismatch(self.layouts, layouts):
            raise StateMismatch(f"this rank was built otherwise than before: {difference}")

        def fill(targets: Sequence[Tensor]) -> None:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)

        self._place(layouts, fill)

    def let_go(self) -> None:
        """Forget what is registered, before others are built: a device may not hold both."""
        self.early.forget()
        self._registry.renew({})
        self._wrapped.clear()
        self._local.renew()
        self._units.renew()

    def renew(self) -> None:
        """Others are registered now, built as the rank that is worn."""
        self._units.renew()
        self.resync.watch()
        self.layouts = self._registry.collect()[0]
        self._buckets = ""
        self.roles.built = self._fabric.rank or 0

    def rest(self) -> None:
        """Hold no rank: neutral groups that report the last rank that is built like this worker;
        scripts print and save on rank 0."""
        size = self._fabric.size or 1
        self._fabric.sandbox(Neutral(), self.roles.resting(size), size)

    def look_ahead(self) -> None:
        """With nothing to do: find out what would hold up all others when a rank is taken."""
        look_ahead(self._fabric.collectives)

    def cancel_unless(self, directive: Directive) -> None:
        """Break off what is under way if it belongs to another duty (any thread)."""
        self.verification.cancel_unless(directive)
        errand = self._errand
        if errand is not None and errand[0] != directive:
            errand[1].close()

    def look_at_buckets(self) -> str:
        """How gradients are summed here, once that is settled.

        For the main thread: DDP keeps its lock while it waits for other ranks, so that another
        thread that asked it would wait for the end of their step.
        """
        if not self._buckets:
            self._buckets = bucket_layout(self._wrapped)
        return self._buckets

    def offer(self, layouts: Layouts, buckets: str | None = None) -> Offer:
        """What this worker has to give, with a state of ``layouts``; for any thread.

        ``buckets``: those of the rank whose state it is, if it is not this worker's own.
        """
        return Offer(
            layouts=layouts,
            buckets=self._buckets if buckets is None else buckets,
            groups=packed(self._fabric.table),
            seeds=self.seeds,
            position=Position() if self.feed is None else self.feed.position,
            roles=self.roles.known,
        )

    def refusal(self, rank: int, offered: Offer) -> str:
        """Why a state that looks like this cannot become that of ``rank`` here; empty if it can.

        Raises:
            OtherRole: it might, once this worker is built as that rank.
        """
        other_groups = self._other_groups(rank, offered)
        if self.roles.several:
            # First: the script's function is to find the groups of the rank that it builds.
            if other_groups:
                return other_groups
            self.roles.known = offered.roles
            if not self.roles.serves(rank):
                self.learn(offered)
                raise RebuildRequired(rank)
        difference = mismatch(self.layouts, offered.layouts)
        if difference:
            return f"the model of this worker is not that of the job: {difference}"
        if difference := part_mismatch(self.layouts, offered.layouts):
            return difference
        return other_groups or bucket_mismatch(self.look_at_buckets(), offered.buckets)

    def _other_groups(self, rank: int, offered: Offer) -> str:
        return group_mismatch(self._fabric.built, unpacked(offered.groups), rank)

    def introduce(self, alike: Partition) -> None:
        """While the job is being set up: let every rank know groups and role of every other one.

        Raises:
            RuntimeError: a rank was lost.
            ValueError: ``alike`` cannot be so.
        """
        groups, rank = self._fabric.groups(), self._fabric.rank or 0
        structure, part = structure_of(self.layouts, groups), part_of(self.layouts)
        role = Role(structure, group_of(alike, rank), self._local.has_buffers, part)
        own = (packed_row(groups, self._fabric.size or 1), role)
        said = gather(self._fabric, own, tuple[tuple[GroupView, ...], Role])
        self._fabric.learn(unpacked(tuple(row for row, _ in said)))
        roles = tuple(role for _, role in said)
        if why := contradiction(roles):
            raise ValueError(why)
        self._know(roles)

    def _know(self, roles: tuple[Role, ...]) -> None:
        self.roles.known = roles
        # All ranks lay their buffers away, or none: who had none would not take part.
        self._local.exchanged = any(role.buffers for role in roles) if roles else None

    def agreed_seeds(self, own: int, *, alone: bool) -> tuple[int, ...]:
        """Base seed of every rank; who is ``alone`` has only its own until it follows a rank."""
        if not self.seeds:
            size = self._fabric.size or 1
            self.seeds = (own,) * size if alone else gather(self._fabric, own, int)
        return self.seeds

    def learn(self, offered: Offer) -> None:
        """Know of the job what the rank knows whose state this is."""
        self.seeds = offered.seeds
        self._fabric.learn(unpacked(offered.groups))
        self._know(offered.roles)

    def adopted(self, rank: int, offered: Offer) -> str:
        """As :meth:`refusal`; if there is none, what was offered is learnt."""
        refusal = self.refusal(rank, offered)
        if not refusal:
            self.learn(offered)
        return refusal

    def put_back(self, copy: StateCopy) -> None:
        """Be the rank as it was when ``copy`` was made, and go to its place in the data.

        Raises:
            StateMismatch: this worker is built as another rank.
        """
        assert self.feed is not None
        if difference := part_mismatch(self.layouts, copy.layouts):
            raise StateMismatch(difference)
        self.early.forget()
        for unit, tensors in copy.units():
            self._units.place(unit.number, unit.layout, tensors)
        boundary, tensors = copy.rest()
        assert boundary.rest is not None
        self._units.place_rest(boundary.rest, tensors)
        self._units.grade(boundary.graded)
        self.resync.restored()
        self._local.forget()
        self.feed.seek(boundary.position.index)

    def send(self, directive: Arm | Sync, move: Move, step: int, wanted: Callable[[], bool]) -> int:
        """Send the state of this rank at ``step`` to the joiner of ``move``; returns the bytes.

        ``wanted``: whether ``directive`` still stands; later changes come by ``cancel_unless``.

        Raises:
            LinkError: the joiner is gone.
            StateMismatch: the joiner refused, or received something else than was sent; or this
                state is spoilt.
        """
        assert move.joiner is not None
        if why := self.resync.spoilt:
            raise StateMismatch(why)
        layouts, tensors = self._registry.collect()
        # Who has lived a replica's life lacks only what the leaver alone has; a copy has all.
        replica = isinstance(directive, Arm) and move.source not in (None, move.leaver)
        local = self._local.own() if replica else self._local.held(move.rank, step)
        if isinstance(directive, Sync) and not local and self._local.is_live:
            log.warning("what only rank %d had is lost; this rank's own is sent", move.rank)
        self.look_at_buckets()
        header = StateHeader(step, self.offer(layouts), local)
        purpose = state_purpose(directive.plan, move.rank)
        link = self._fabric.connect(move.joiner, purpose, timeout=CONNECT_TIMEOUT_S)
        with self._running(directive, link) as owned:
            if not wanted():
                raise LinkError("the duty has changed")
            if transfer.offer(link, header):
                digest = self._digest(step)
                if isinstance(directive, Sync):
                    owned.pop_all()
                    self.verification.give(directive, link, digest)
                    return 0
                if transfer.confirm(link, digest):
                    return 0
            return transfer.send_tensors(link, tensors)

    @contextmanager
    def _running(self, directive: Directive, link: Link) -> Iterator[ExitStack]:
        """``link`` is closed as soon as another duty comes, and at the end, unless it is passed on
        before."""
        self._errand = (directive, link)
        with ExitStack() as owned:
            owned.callback(link.close)
            try:
                yield owned
            finally:
                self._errand = None

    def receive(
        self, takeover: Takeover, cancelled: Callable[[], bool], has_step: int | None = None
    ) -> None:
        """Take over the state and the place in the data.

        ``has_step``: the state of a replica at the start of this step is in place already, but for
        what only the rank itself has. After a loss that is to be proved (``proving``).

        Raises:
            LinkError: the source is gone, or the take-over was called off.
            StateMismatch: the state does not fit, or what arrived is not what was sent.
            WalkOn: the place in the data is in a later ``batches()`` call; call again from there.
            OtherRole: this worker must be built as the rank; call again then.
        """
        assert self.feed is not None
        if takeover.link is None or takeover.header is None:
            self._meet(takeover, cancelled)
        link, header = takeover.link, takeover.header
        assert link is not None
        assert header is not None
        directive, offer = takeover.directive, header.offer
        refusal = self.start_over(directive, offer) if isinstance(directive, Sync) else ""
        if refusal := refusal or self.adopted(takeover.rank, offer):
            transfer.answer(link, refusal)
            link.close()
            raise StateMismatch(refusal)
        if header.offer.position.call > self.feed.call:
            raise AdvanceToNextLoop
        with self._running(directive, link) as owned:
            has = has_step == header.step
            transfer.answer(link, has=has)
            if has and isinstance(directive, Sync):
                digest = self._digest(header.step)
                owned.pop_all()
                takeover.link = None
                self.verification.take(directive, link, digest)
            elif not (has and transfer.has_same(link, self._digest(header.step))):
                self._place(offer.layouts, partial(transfer.receive_tensors, link))
        self._local.adopt(header.local)
        self.resync.restored()
        takeover.timings["transfer"] = time.monotonic() - takeover.started

    def _digest(self, step: int) -> Callable[[], Digest]:
        """Of all that replicas have in common: not of the buffers."""
        found = self.early.of(step)
        return lambda: {k: v for k, v in found().items() if k != BUFFERS}

    def _place(self, layouts: Layouts, fill: Callable[[list[Tensor]], object]) -> None:
        """Put a state of ``layouts`` in place, whose tensors ``fill`` fills."""
        self.early.forget()
        targets, pending = self._registry.place(layouts)
        fill(targets)
        for late in pending:
            late.apply()

    def walk(self, takeover: Takeover) -> None:
        """Go to the place in the data that was taken over; the rank must be told by then."""
        assert self.feed is not None
        assert takeover.header is not None
        self.feed.seek(takeover.header.offer.position.index)

    def stay(self) -> None:
        """Give the batches of the rank that is held now, from the same place in the data on."""
        assert self.feed is not None
        self.feed.seek(self.feed.position.index)

    def _meet(self, takeover: Takeover, cancelled: Callable[[], bool]) -> None:
        purpose = state_purpose(takeover.plan, takeover.rank)
        link = self._fabric.accept(purpose, cancel=cancelled)
        takeover.started = time.monotonic()
        try:
            header = transfer.consider(link)
        except LinkError:
            # Or the source would wait for an answer.
            link.close()
            raise
        takeover.link, takeover.header = link, header
