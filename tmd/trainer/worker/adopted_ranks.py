"""What a worker does in its steps for ranks that it has adopted (:mod:`tmd.fabric.passes`).

Main thread only.
"""

from __future__ import annotations

from tmd.core.values.errors import LinkError
from tmd.fabric import Fabric
from tmd.trainer.state.local import LocalState


class AdoptedRanks:
    """Tells the fabric of each pass, and notes what a worker could not do for several ranks."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric, self._passes = fabric, fabric.passes

    # --- for the session --------------------------------------------------------------------------

    def allow(self, obstacle: str) -> None:
        """The script lets this worker adopt ranks. ``obstacle``: why it cannot, or empty."""
        self._passes.request_elastic(obstacle or self._unshared())

    def _unshared(self) -> str:
        """What of the groups keeps this worker from computing for several ranks."""
        generations = self._fabric.generations
        if generations.kind is not None:
            return f"its collectives are carried by {generations.carrier}"
        size = self._fabric.size or 1
        part = next((g.name for g in self._fabric.built if len(g.ranks) < size), "")
        return f"group {part} has not all ranks" if part else ""

    def refuse(self, why: str) -> None:
        """From now on this worker cannot adopt ranks."""
        self._passes.refuse(why)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks for which each step is computed, in this order; one or none is the usual.

        The lowest is last, in the pass that commits: scripts print and save on rank 0.
        """
        return tuple(reversed(self._passes.held))

    def draw_for(self, rank: int) -> None:
        """The batches of ``rank`` are drawn: a loader of the script may ask for its rank."""
        self._passes.begin(rank, first=True, last=True)

    def begin_pass(self, rank: int, *, first: bool, last: bool) -> None:
        """The script computes for ``rank`` from now on."""
        self._passes.begin(rank, first=first, last=last)

    def end_pass(self) -> bool:
        """A pass that is not the last is over; returns whether its step goes on."""
        self._drain()
        self._check_operations()
        return not self._fabric.poisoned

    def _drain(self) -> None:
        """Wait for what the script has called in this pass. If that does not end, the epoch is
        abandoned: this worker cannot tell which results of it the others have received."""
        try:
            self._fabric.drain()
        except LinkError as error:
            self._fabric.poison(str(error))

    # --- for the coordinator ----------------------------------------------------------------------

    def begun(self) -> None:
        """The script begins to compute a step."""
        self._passes.open_step()

    def come_to_vote(self, local: LocalState) -> None:
        """A step has come to its vote. If a sum may lack a rank, or something was computed that
        passes cannot share, its epoch is abandoned."""
        if not self._passes.shrunk:
            self._passes.open = False
            if self._passes.inelastic == "":
                self._passes.refuse(self._obstacle(local))
            return
        self._drain()  # an operation belongs to the pass that has called it
        self._passes.open = False
        local.look()
        if why := self._obstacle(local) or self._passes.inelastic:
            self._abandon(why)
        self._check_operations()

    def _check_operations(self) -> None:
        """Abandon the epoch if a sum would lack what this pass has not given. In a poisoned epoch,
        as after another loss, operations end before they are counted."""
        if not self._passes.complete and not self._fabric.poisoned:
            self._abandon("its steps call fewer operations for one rank than for another")

    def _abandon(self, why: str) -> None:
        self._passes.refuse(why)
        self._fabric.poison(why)

    def _obstacle(self, local: LocalState) -> str:
        if local.is_live:
            return "its model has buffers that steps change, such as BatchNorm's"
        return self._unshared()

    def leave_step(self) -> None:
        """The script has come to its next batch."""
        self._passes.open = False
        self._passes.end()

    def hand_on(self, payload: bytes, offset: int) -> bytes:
        """As :meth:`Fabric.shift`, of copies for other ranks: there are none while ranks are
        adopted, since then no state is local to a rank."""
        if not self._passes.shrunk:
            return self._fabric.shift(payload, offset)
        if self._fabric.tap is not None:  # a joiner expects one from each step
            self._fabric.tap.shifted(offset, b"")
        return b""
