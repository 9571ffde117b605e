"""Decides whether an offered state fits this worker, and states what this worker offers."""

from __future__ import annotations

from tmd.core.planning.directives import Sync
from tmd.fabric import Fabric, GroupView, Neutral, packed, packed_row, unpacked
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.step_vote import gather
from tmd.trainer.state.compatibility import bucket_mismatch, group_mismatch, part_mismatch
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.replicas import Partition, group_of
from tmd.trainer.state.roles import Role, Roles, contradiction, part_of, structure_of
from tmd.trainer.state_transfer.obstacle import Rebuild
from tmd.trainer.state_transfer.rank_state import RankState


class Fit:
    """This worker's knowledge of the job's ranks. Main thread only, except :meth:`offer`."""

    def __init__(self, fabric: Fabric, state: RankState, *, several: bool = False) -> None:
        """``several``: the script can build other roles, too."""
        self._fabric = fabric
        self._state = state
        self._started_over: Sync | None = None
        self.seeds: tuple[int, ...] = ()
        """Base seed of every rank."""
        self.roles = Roles(several=several)
        self.roles.built = fabric.rank or 0

    def renew(self) -> None:
        """Use the objects registered now, built for the rank that is held or impersonated."""
        self.roles.built = self._fabric.rank or 0

    def rest(self) -> None:
        """Hold no rank: neutral groups report the last rank with the role of this worker.

        Scripts print and save on rank 0, so a standby never impersonates that one.
        """
        size = self._fabric.size or 1
        self._fabric.sandbox(Neutral(), self.roles.resting(size), size)

    # --- knowing the job --------------------------------------------------------------------------

    def introduce(self, alike: Partition) -> None:
        """Exchange groups and role with every other rank, while the job is set up.

        Raises:
            RuntimeError: a rank was lost.
            ValueError: ``alike`` contradicts the roles of the ranks.
        """
        groups, rank = self._fabric.groups(), self._fabric.rank or 0
        layouts, buffers = self._state.layouts, self._state.local.has_buffers
        role = Role(
            structure_of(layouts, groups),
            group_of(alike, rank),
            buffers,
            part_of(layouts),
            self._state.buckets,
        )
        own = (packed_row(groups, self._fabric.size or 1), role)
        rows = gather(self._fabric, own, tuple[tuple[GroupView, ...], Role])
        self._fabric.learn(unpacked(tuple(row for row, _ in rows)))
        roles = tuple(role for _, role in rows)
        if why := contradiction(roles):
            raise ValueError(why)
        self._know(roles)

    def agreed_seeds(self, own: int, *, alone: bool) -> tuple[int, ...]:
        """Base seed of every rank; a worker that is ``alone`` has only its own until it joins."""
        if not self.seeds:
            size = self._fabric.size or 1
            self.seeds = (own,) * size if alone else gather(self._fabric, own, int)
        return self.seeds

    def learn(self, offered: Offer) -> None:
        """Learn about the job from the source of ``offered``."""
        self.seeds = offered.seeds
        self._fabric.learn(unpacked(offered.groups))
        self._know(offered.roles)

    def _know(self, roles: tuple[Role, ...]) -> None:
        self.roles.known = roles
        # Either all ranks store their buffers with others or none: each takes part in the exchange.
        self._state.local.exchanged = any(role.buffers for role in roles) if roles else None

    # --- offers -----------------------------------------------------------------------------------

    def offer(self, layouts: Layouts) -> Offer:
        """What this worker offers, with a state of ``layouts``; any thread."""
        return Offer(
            layouts=layouts,
            groups=packed(self._fabric.table),
            seeds=self.seeds,
            position=self._state.position,
            roles=self.roles.known,
        )

    def refusal(self, rank: int, offered: Offer) -> str | Rebuild:
        """Why the offered state cannot become that of ``rank`` here; empty if it can.

        A ``Rebuild``: it may fit once the model is built for that rank.
        """
        other_groups = self._other_groups(rank, offered)
        if self.roles.several:
            # First, since the script's function must find the groups of the rank that it builds.
            if other_groups:
                return other_groups
            self.roles.known = offered.roles
            if not self.roles.serves(rank):
                self.learn(offered)
                return Rebuild(rank)
        if difference := self._state.difference(offered.layouts):
            return f"the model of this worker differs from the job's: {difference}"
        if difference := part_mismatch(self._state.layouts, offered.layouts):
            return difference
        return other_groups or bucket_mismatch(self._state.buckets, offered.roles, rank)

    def adopted(self, rank: int, offered: Offer) -> str | Rebuild:
        """As :meth:`refusal`; learns what was offered if there is none."""
        refusal = self.refusal(rank, offered)
        if not refusal:
            self.learn(offered)
        return refusal

    def start_over(
        self, directive: Sync, offered: Offer | None = None, *, survives: bool = False
    ) -> str | Rebuild:
        """Rebuild all ranks where no step was ever committed, so that none is ahead of others.

        In its first step a pipeline settles what it sends in all later ones. When that step broke
        some ranks may have settled this, as a joiner has in its shadow iterations. Returns the due
        rebuild, or why this worker cannot assume the rank with what is ``offered``; else nothing.

        Args:
            directive: all rebuild once for each.
            offered: the source's knowledge of the job; ``None`` for a survivor.
            survives: this worker has the state that the job continues from.
        """
        if not self.roles.several or directive.resume != 0 or self._started_over == directive:
            return ""
        if offered is not None:
            if refusal := self._other_groups(directive.rank, offered):
                return refusal
            self.learn(offered)
        self._started_over = directive
        return Rebuild(directive.rank, cold=True, keeps=survives)

    def _other_groups(self, rank: int, offered: Offer) -> str:
        return group_mismatch(self._fabric.built, unpacked(offered.groups), rank)
