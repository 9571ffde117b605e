"""The checkpoints of a session: resumes from the newest one, and schedules new ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any

from msgspec import json

from tmd.at_exit import at_exit
from tmd.fabric.backend import ends_by_error
from tmd.trainer.checkpoints.archive import CheckpointReader
from tmd.trainer.checkpoints.checkpoints import Checkpoints, CheckpointSchedule, Tell
from tmd.trainer.checkpoints.naming import OWN, PRIVATE, Names, Path, Placing
from tmd.trainer.checkpoints.placing import placing
from tmd.trainer.checkpoints.resuming import Gathered, buffers_of, check, chosen, opened, restore
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.verification import StateVerdict

log = logging.getLogger("tmd.trainer")


class Saving:
    """Main thread only."""

    def __init__(
        self,
        order: CheckpointSchedule,
        registry: Registry,
        alike: Callable[[], Partition],
        size: int,
        tell: Tell,
        verdict: Callable[[], StateVerdict],
    ) -> None:
        """Raises:
        RuntimeError: an optimizer's state has no name that ranks could share.
        ValueError: the name of a registered object is reserved.
        """
        if registry.divided:
            raise RuntimeError(
                "session.checkpoint() does not support a ZeroRedundancyOptimizer: gather its state "
                "with consolidate_state_dict() and save it in the script"
            )
        if taken := [n for n in registry.named if n == OWN or PRIVATE.fullmatch(n)]:
            raise ValueError(f"register({taken[0]}=...): checkpoints reserve that name")
        self._order, self._size = order, size
        self._named: Callable[[], Names] = lambda: Names(registry, alike())
        self.checkpoints = Checkpoints(order, self._named, size, tell, verdict)
        at_exit(self.checkpoints.close)
        at_exit(self._report_unloaded)
        self._before: CheckpointReader | None = None
        """The checkpoint to resume from, until it is restored."""
        self._place: Placing
        """Finds names in it."""

    def choose(self, rank: int, gathered: Gathered, *, resume: bool) -> None:
        """Agree with all ranks on the checkpoint to resume from, if there is one.

        Raises:
            ConfigError: the folder cannot be used.
            StateMismatch: it cannot be divided among the current ranks.
        """
        folder = self._order.folder
        step, self.checkpoints.run = chosen(folder, rank, gathered, resume=resume)
        if step is not None:
            self._before = opened(folder, step)
            names = self._named()
            # The values of another rank have no buffers of this one.
            fits = self._before.seal.size == self._size or names.home(rank) == 0
            own = names.claims(rank), names.awaited() if fits else []
            texts = gathered(json.encode(own).decode())
            every = [json.decode(text, type=tuple[list[Path], list[Path]]) for text in texts]
            claims = [claimed for claimed, _ in every]
            awaited = {name for _, later in every for name in later}
            self._place = placing(self._before.saved, claims)
            check(self._before, claims, self._place, self._size, awaited)
        if rank == 0:
            place = "starting from scratch" if self._before is None else "resuming"
            found = "no checkpoint" if self._before is None else str(self._before.path)
            log.warning("checkpoints every %d steps; %s: %s", self._order.every, found, place)
            if self._before is not None and (call := self._before.seal.position.call):
                log.warning(
                    "%s is loaded only in loop %d over session.batches() (the first is 0); the "
                    "loops before it give no batches",
                    *(self._before.path, call),
                )

    def _report_unloaded(self) -> None:
        """The process ends: warn if the checkpoint was not restored."""
        if self._before is not None and not ends_by_error():
            log.error(
                "%s was never loaded: it belongs to loop %d over session.batches(), counted from "
                "0, and the script has ended before. What it has computed, printed and saved comes "
                "from a model as at a fresh start",
                *(self._before.path, self._before.seal.position.call),
            )

    def skips(self, call: int) -> bool:
        """Whether ``batches()`` call number ``call`` ended before the checkpoint."""
        return self._before is not None and call < self._before.seal.position.call

    def go_on(self, feed: Feed, local: LocalState, rank: int, seed: int) -> int | None:
        """Restore state and data position of the checkpoint; returns its step.

        Ranks exchange copies of their buffers in a vote. Until the first one a rank has those of
        its neighbours from the checkpoint.
        """
        before, self._before = self._before, None
        if before is None:
            return None
        names = self._named()
        restore(before, names, self._place, rank, self._size, seed)
        feed.resume(before.seal.position)
        step = before.seal.step
        for other in local.neighbours(rank, self._size):
            if (buffers := buffers_of(before, names, other, self._size)) is not None:
                local.hold(other, step, buffers)
        self.checkpoints.passed(step)
        return step


def ordered(path: Any, every: int, keep: int, *, at_end: bool) -> CheckpointSchedule:
    """Raises ValueError: a number is below one."""
    if every < 1 or keep < 1:
        raise ValueError(f"session.checkpoint(every={every}, keep={keep}): both are at least 1")
    return CheckpointSchedule(Folder(path).absolute(), every, keep, at_end)
