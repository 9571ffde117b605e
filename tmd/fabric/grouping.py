"""The process groups of this worker, and the ranks they currently stand for.

A script that runs alike on all ranks builds its groups in one order: the n-th group has the same
role on every rank. So a group is a position in a list, and its global ranks follow from the rank
that this worker holds or assumes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.core.worker.broken_step import Progress, Rerun
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.frame import VOTE
from tmd.fabric.link import Link
from tmd.fabric.step_log import StepLog
from tmd.fabric.topology import neighbours


class GroupView(NamedTuple):
    """A group: its id, equal on all its ranks, and its global ranks."""

    name: str
    ranks: tuple[int, ...]


GroupTable = tuple[tuple[GroupView, ...], ...]
"""By rank: its groups in order of creation."""


def packed(table: GroupTable) -> GroupTable:
    """The table to send: a group of all ranks omits the numbers that every rank would repeat."""
    return tuple(packed_row(row, len(table)) for row in table)


def packed_row(row: Sequence[GroupView], size: int) -> tuple[GroupView, ...]:
    """The groups of one rank in a world of ``size``, in the form of :func:`packed`."""
    world = tuple(range(size))
    return tuple(view._replace(ranks=()) if view.ranks == world else view for view in row)


def unpacked(table: GroupTable) -> GroupTable:
    """The inverse of :func:`packed`; equal groups become one object."""
    world = tuple(range(len(table)))
    known: dict[GroupView, GroupView] = {}
    return tuple(
        tuple(
            known.setdefault(view, view if view.ranks else view._replace(ranks=world))
            for view in row
        )
        for row in table
    )


def edges(
    views: Sequence[GroupView], membership: Membership, rank: int
) -> list[tuple[str, Member]]:
    """(group, neighbour) of ``rank`` in every one of its groups and in the vote."""
    world = GroupView(VOTE, tuple(range(membership.size)))
    return [
        (name, membership.members[ranks[near]])
        for name, ranks in ((view.name, membership.crew(view.ranks)) for view in (*views, world))
        if rank in ranks
        for near in sorted(neighbours(ranks.index(rank), len(ranks)))
    ]


class Participant(Protocol):
    """The interface that the fabric needs of a group."""

    @property
    def view(self) -> GroupView: ...
    @property
    def busy(self) -> bool:
        """Whether an operation is running or queued."""
        ...

    @property
    def waits(self) -> bool:
        """Whether one waits for other ranks, and not for this worker's own device."""
        ...

    @property
    def expects_message(self) -> bool:
        """Whether a posted receive is not complete."""
        ...

    @property
    def log(self) -> StepLog: ...
    def comes_to_rest(self) -> bool: ...
    def go_back(self, again: Rerun) -> None: ...
    def assume(self, view: GroupView) -> None: ...
    def settle(self) -> None: ...
    def rest(self) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def attach(self, link: Link) -> None: ...
    def abandon(self, standing: EpochView) -> None: ...
    def carry(self, old: EpochView, new: EpochView) -> None: ...
    def has_in_flight(self, standing: EpochView, moved: frozenset[int]) -> bool: ...
    def shutdown(self) -> None: ...


class Groups:
    """All groups in order of creation; destroyed ones leave no gap."""

    def __init__(self) -> None:
        self._groups: list[Participant] = []
        self._built: list[GroupView] = []
        self.table: GroupTable = ()
        """The groups of every rank, once known."""

    def __iter__(self) -> Iterator[Participant]:
        return iter(list(self._groups))

    @property
    def waiting(self) -> bool:
        """Whether an operation waits for other ranks, as far as known."""
        return any(group.waits for group in self)

    @property
    def quiet(self) -> bool:
        """Whether no operation runs or is queued, and no message is expected."""
        return not any(group.busy or group.expects_message for group in self)

    def settle(self) -> None:
        """Wait until inner groups have ended what was called so far."""
        for group in self:
            group.settle()

    def rest(self) -> None:
        """Wait for the collectives called so far, and for the callbacks that are attached to
        them."""
        for group in self:
            group.rest()

    def settle_within(self, seconds: float) -> tuple[str, ...]:
        """Like :meth:`settle`, for a limited time; returns the groups of which nothing runs."""
        if any(group.busy for group in self):
            settling = threading.Thread(target=self.settle, name="tmd-settle", daemon=True)
            settling.start()
            settling.join(seconds)
        return tuple(group.view.name for group in self if not group.busy)

    def drain(self, timeout: float) -> None:
        """Wait for all operations called so far. Raises LinkError if one takes longer."""
        for group in self:
            if not group.drain(timeout):
                raise LinkError(f"group {group.view.name} is still inside an operation")

    def abandon(self, standing: EpochView) -> None:
        """Complete the operations that wait in the ended ``standing``."""
        for group in self:
            group.abandon(standing)

    def carry(self, old: EpochView, new: EpochView) -> None:
        """Let the receives of ``old`` wait in ``new``, which follows it by plan."""
        for group in self:
            group.carry(old, new)

    def end(self, timeout: float) -> None:
        """End all, once what they run is complete or has taken ``timeout``."""
        for group in self:
            group.drain(timeout)
            group.shutdown()

    def begin_step(self, *, keeps: bool) -> bool:
        """A step begins. ``keeps``: whether its operations shall be able to run again; returns
        whether they are."""
        keeps = keeps and all(group.comes_to_rest() for group in self) and self.quiet
        for group in self:
            group.log.restart(keeps=keeps)
        return keeps

    @property
    def kept_bytes(self) -> int:
        """Bytes of host memory for the inputs of operations that may have to run again."""
        return sum(group.log.nbytes for group in self)

    @property
    def progress(self) -> dict[str, Progress]:
        """How far each group has come in the present step; no operation runs."""
        return {group.view.name: group.log.progress for group in self}

    def go_back(self, again: Mapping[str, Rerun]) -> None:
        """Run the given operations of each group again."""
        for group in self:
            group.go_back(again.get(group.view.name, Rerun()))

    def expect(self, again: Mapping[str, Rerun]) -> None:
        """Other ranks run these operations again in the step that begins next here."""
        for group in self:
            group.log.expect(again.get(group.view.name, Rerun()))

    @property
    def views(self) -> tuple[GroupView, ...]:
        """The groups as they are now."""
        return tuple(group.view for group in list(self._groups))

    @property
    def built(self) -> tuple[GroupView, ...]:
        """The groups as the script has built them."""
        return tuple(self._built)

    def of(self, rank: int) -> tuple[GroupView, ...]:
        """The groups as they would be for ``rank``."""
        row = self.table[rank] if rank < len(self.table) else ()
        # A group built after the table either spans the world or prevents moves.
        return (*row[: len(self._built)], *self._built[len(row) :])

    def named(self, name: str) -> Participant | None:
        return next((g for g in list(self._groups) if g.view.name == name), None)

    def add(self, group: Participant) -> None:
        self._groups.append(group)
        self._built.append(group.view)

    def remove(self, group: Participant) -> bool:
        """Remove ``group``; return whether it was here."""
        if group not in self._groups:
            return False
        place = self._groups.index(group)
        del self._groups[place]
        del self._built[place]
        # The other ranks destroy their groups, too.
        self.table = tuple((*row[:place], *row[place + 1 :]) for row in self.table)
        return True

    def assume(self, rank: int) -> bool:
        """Become the groups of ``rank``, as far as known; return whether any changed.

        A group that changes must not have a running operation.
        """
        wanted = self.of(rank)
        changed = [(g, v) for g, v in zip(self._groups, wanted, strict=True) if g.view != v]
        for group, view in changed:
            group.assume(view)
        return bool(changed)
