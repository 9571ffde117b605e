"""The identity of a process group for torch: the part without communication.

A view: it stores a group id and global ranks, and asks the fabric for the rank at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tmd.core.worker.broken_step import Rerun
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.fabric import Fabric
from tmd.fabric.grouping import GroupView
from tmd.fabric.link import Link
from tmd.fabric.mailbox import Mailbox
from tmd.fabric.runner import Runner
from tmd.fabric.step_log import StepLog
from tmd.fabric.wait_timer import WaitTimer


class Identity(dist.ProcessGroup):
    """Group ``name`` over the global ``ranks`` of ``fabric``; lives until ``shutdown``."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        ranks: Sequence[int],
        *,
        timeout: timedelta = timedelta(minutes=30),
        strict: bool = False,
    ) -> None:
        """``strict``: aborted operations raise, for use without a vote."""
        super().__init__(0, len(ranks))  # type: ignore[call-arg]
        self.view = GroupView(name, tuple(ranks))
        self._fabric = fabric
        self._name = name
        self._description = "undefined"
        self._timeout = timeout
        self._runner = Runner(fabric, self.view, timeout.total_seconds(), strict=strict)
        self._awaited = WaitTimer()
        self._mailbox = Mailbox(name, self.view.ranks, lambda: fabric.standing)
        fabric.join(self)

    # --- called by torch -----------------------------------------------------------------------

    def rank(self) -> int:
        """Rank in this group, -1 if the fabric's rank is not in it."""
        rank = self._fabric.rank
        return self.view.ranks.index(rank) if rank in self.view.ranks else -1

    def size(self) -> int:
        return len(self.view.ranks)

    # C++ calls these two where Python calls the two above.
    getRank = rank
    getSize = size

    def name(self) -> str:
        return "tmd"

    getBackendName = name
    _get_backend_name = name

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        # torch asks a group's backend for its capabilities; here group and backend are one object.
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _has_hooks(self) -> bool:
        return False

    def _set_default_backend(self, backend_type: Any) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._runner.seq

    def _wait_for_pending_works(self) -> None:
        self.drain(self._timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Applies only to operations that open a link from now on."""
        self._timeout = timeout
        self._runner.patience = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- called by the fabric ------------------------------------------------------------------

    def assume(self, view: GroupView) -> None:
        """Become another rank's group of the same size; torch keeps the name. No operation runs."""
        self.view = view
        self._runner.view = view
        self._mailbox.assume(*view)

    def comes_to_rest(self) -> bool:
        """See :meth:`Runner.comes_to_rest`."""
        return self._runner.comes_to_rest()

    @property
    def busy(self) -> bool:
        """Whether an operation is running or queued."""
        return self._runner.lane.busy

    @property
    def waits(self) -> bool:
        """Whether an operation waits for other ranks, and not for this worker's own device."""
        return self._runner.lane.busy and self._fabric.blocked.own == 0

    @property
    def expects_message(self) -> bool:
        """Whether a posted receive is not complete."""
        return self._awaited.level > 0

    @property
    def log(self) -> StepLog:
        """The operations of the present step."""
        return self._runner.log

    def go_back(self, again: Rerun) -> None:
        """Run the complete operations of ``again`` once more."""
        self._runner.go_back(again)

    def settle(self) -> None:
        """Wait for operations that an inner group runs; here there is none."""

    def drain(self, timeout: float) -> bool:
        """Wait for collectives and sends; ``False`` after ``timeout``."""
        return self._runner.lane.drain(timeout) and self._mailbox.drain(timeout)

    def attach(self, link: Link) -> None:
        """Take over a link for messages that a peer has opened."""
        self._mailbox.attach(link)

    def abandon(self, standing: EpochView) -> None:
        """Complete the operations that wait in the ended ``standing``."""
        self._mailbox.abort(standing)

    def carry(self, old: EpochView, new: EpochView) -> None:
        """Move waiting operations from ``old`` to ``new``, which follows it by plan."""
        self._mailbox.carry(old, new)

    def has_in_flight(self, standing: EpochView, moved: frozenset[int]) -> bool:
        """Whether a message from a rank of ``moved``, or to this rank if it moves, is in flight."""
        if moved.isdisjoint(self.view.ranks):
            return False
        # The sender of a message that is being read is no longer known.
        being_read = self._awaited.level > self._mailbox.waiting
        return being_read or self._mailbox.has_in_flight(standing, moved)

    # --- the end -------------------------------------------------------------------------------

    def abort(self) -> None:
        """torch: abandon everything that runs."""
        self._fabric.poison(f"group {self._name} was aborted")
        self.shutdown()

    def rest(self) -> None:
        """See :meth:`Runner.rest`."""
        self._runner.rest()

    def shutdown(self) -> None:
        """Close the links and end the threads of this group; idempotent."""
        links = self._fabric.destroy_group(self)
        self._runner.lane.close()
        self._runner.callbacks.close()
        self._mailbox.close()
        # A descriptor must not be reused under an operation.
        if not self._runner.lane.busy and self._mailbox.drain(0):
            for link in links:
                link.close()
