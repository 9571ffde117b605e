"""Accounts for the time of a simulated job: useful, or lost to a cause.

A checkpoint is due every ``every_s`` seconds of training, and training waits ``save_s`` for it.
Several that fall into one stretch are counted in closed form.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tmd.simulate.values import Cause, LostWork, WorkDone

ROUNDING = 1e-6
"""Share of a step that is rounding and no work."""


class TrainingPace(NamedTuple):
    """What training costs beside steps."""

    step_s: float
    every_s: float = 0.0
    """Training time between two checkpoints; 0 for none."""
    save_s: float = 0.0
    snapshot_share: float = 0.0
    """Time for snapshots, as a share of training."""
    shadow_share: float = 0.0
    """Slow-down for hot standbys, as a share of training."""


class TimeLedger:
    """Useful and lost seconds."""

    def __init__(self, pace: TrainingPace) -> None:
        self.pace = pace
        self.useful_s = 0.0
        self.lost_s: dict[Cause, float] = defaultdict(float)
        self._cycle_s = 0.0
        self._unsaved_s = 0.0

    @property
    def work(self) -> WorkDone:
        steps = int(self.useful_s / self.pace.step_s + ROUNDING)
        in_step = max(0.0, self.useful_s - steps * self.pace.step_s)
        return WorkDone(steps, in_step, self._unsaved_s)

    def stand(self, seconds: float, cause: Cause) -> None:
        """Time in which nothing is computed."""
        self.lost_s[cause] += seconds

    def train(self, seconds: float, speed: float) -> None:
        """Time in which a share of the replicas trains."""
        training, saved = self._through(seconds)
        pace = self.pace
        self.lost_s[Cause.CHECKPOINT] += seconds - training
        useful = self._useful(training, speed)
        self.lost_s[Cause.SHRUNK] += training * (1.0 - speed)
        self.lost_s[Cause.SNAPSHOT] += useful * pace.snapshot_share
        self.lost_s[Cause.SHADOW] += useful * pace.shadow_share
        self.useful_s += useful
        if saved is None:
            self._unsaved_s += useful
        else:
            self._unsaved_s = self._useful(saved, speed)

    def lose(self, loss: LostWork) -> None:
        """Work is lost and will be done again."""
        seconds = min(loss.seconds, self.useful_s)
        self.useful_s -= seconds
        self._unsaved_s = max(0.0, self._unsaved_s - seconds)
        self.lost_s[loss.cause] += seconds

    def from_checkpoint(self) -> None:
        """All that is not saved has been counted as lost; the next checkpoint is far."""
        self._cycle_s = self._unsaved_s = 0.0

    def _useful(self, training: float, speed: float) -> float:
        return training * speed / (1.0 + self.pace.snapshot_share + self.pace.shadow_share)

    def _through(self, seconds: float) -> tuple[float, float | None]:
        """Training time within the next ``seconds``, and how much of it came after the start of the
        latest complete checkpoint; ``None`` if none was completed."""
        every, save = self.pace.every_s, self.pace.save_s
        if not every:
            return seconds, None
        begin, end = self._cycle_s, self._cycle_s + seconds
        period = every + save
        cycles, rest = divmod(end, period)
        self._cycle_s = rest
        trained = cycles * every + min(rest, every) - min(begin, every)
        return trained, min(rest, every) if cycles else None
