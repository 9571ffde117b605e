"""Checkpoints of the end of a ``batches()`` call, from which a job goes on behind the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.standalone import Voting
from tmd.core.values.checkpoints import complete
from tmd.core.values.errors import StateMismatch
from tmd.trainer import Session
from tmd.trainer.session.hooks import Interrupted

STEPS = 4
"""Batches of one epoch."""

# A job that resumes behind the loop steps its schedule first.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


class Run:
    """A process that trains some epochs, and steps the schedule behind each of them."""

    def __init__(
        self, folder: Path, *, stops: bool = False, counters: Sequence[str] = (), **schedule: Any
    ) -> None:
        """``stops``: the loop is left by ``break``, with batches left over."""
        self.hooks = Voting()
        self.session = Session(self.hooks)
        for name in counters:
            self.session.counter(name, 0)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = ExponentialLR(self.optimizer, 0.5)
        self.session.register(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self._stops, self._shuffles = stops, not stops
        self.given = 0
        """Number of batches given."""
        self.skipped: list[bool] = []
        schedule = {"every": 3, "at_end": True, "keep": 100, **schedule}
        self.session.checkpoint(folder, **schedule)

    def epoch(
        self,
        loader: Any = None,
        *,
        stop: int = STEPS,
        fails: type[BaseException] | None = None,
        **options: Any,
    ) -> None:
        data = torch.arange(2.0 * 2 * STEPS).view(2 * STEPS, 2)
        data = data if self._stops else data[:STEPS]
        loader = loader or DataLoader(TensorDataset(data), shuffle=self._shuffles, batch_size=1)
        for given in self.session.batches(loader, **options):
            self.given += 1
            with self.session.step():
                self.optimizer.zero_grad()
                for (batch,) in given if "accumulate" in options else [given]:
                    self.model(batch).square().mean().backward()
                self.optimizer.step()
            if fails is not None:
                raise fails
            if self._stops and self.session.position.index == stop:
                break
        self.skipped.append(self.session.skipped)
        self.scheduler.step()

    def close(self) -> None:
        saving = self.session._loop.saving
        assert saving is not None
        saving.checkpoints.close()

    @property
    def state(self) -> list[float]:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        return [*weights.tolist(), *self.scheduler.get_last_lr(), self.session.step_number]


@contextmanager
def run(folder: Path, **options: Any) -> Iterator[Run]:
    made = Run(folder, **options)
    try:
        yield made
    finally:
        made.close()


def test_a_checkpoint_that_was_never_loaded_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script makes fewer loops than the one that wrote it, and would save a fresh model."""
    with run(tmp_path, every=100) as job:
        job.epoch()
        job.epoch()
    with run(tmp_path, every=100) as again:
        saving = again.session._loop.saving
        assert saving is not None
        again.epoch()
        assert again.skipped == [True]
        assert "is loaded only in loop 1" in caplog.text
        saving._report_unloaded()
        assert "was never loaded: it belongs to loop 1" in caplog.text
        caplog.clear()
        again.epoch()
        saving._report_unloaded()
        assert not caplog.text


@pytest.mark.parametrize("names", [("tokens",), ("best", "tokens"), ()])
def test_a_job_with_other_objects_does_not_resume(names: tuple[str, ...], tmp_path: Path) -> None:
    """Their values would go to others."""
    with run(tmp_path, counters=("best",)) as job:
        job.epoch()
    with run(tmp_path, counters=names) as again:
        shown = ", ".join(("scheduler", *names))
        with pytest.raises(StateMismatch, match=f"this script registers {shown}: give"):
            again.epoch()


def test_a_job_goes_on_behind_the_loop(tmp_path: Path) -> None:
    """With the numbers of one that was never stopped. The script steps its schedule there."""
    with run(tmp_path / "undisturbed") as undisturbed:
        undisturbed.epoch()
        undisturbed.epoch()
    with run(tmp_path / "stopped") as first:
        first.epoch()
    with run(tmp_path / "stopped") as second:
        second.epoch()
        assert (second.given, second.skipped) == (0, [False])
        assert second.state == first.state
        second.epoch()
        assert second.given == STEPS
        assert second.state == undisturbed.state
    assert complete(p.name for p in (tmp_path / "stopped").iterdir()) == complete(
        p.name for p in (tmp_path / "undisturbed").iterdir()
    )


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"at_end": False}, [3]),
        ({}, [4, 3]),
        ({"stops": True}, [3]),  # a job that is stopped goes on in its loop
        ({"every": 100}, [4]),
        ({"every": 4}, [4]),
    ],
)
def test_the_end_is_a_checkpoint_of_its_own(
    options: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    """It is complete when the loop has ended."""
    with run(tmp_path, **options) as job:
        job.epoch()
        if steps[0] == STEPS:
            assert complete(p.name for p in tmp_path.iterdir()) == steps
    assert complete(p.name for p in tmp_path.iterdir()) == steps


def test_the_first_step_of_the_next_loop_is_not_saved_once_more(tmp_path: Path) -> None:
    with run(tmp_path, every=4) as job:
        job.epoch()
        job.epoch()
    assert complete(p.name for p in tmp_path.iterdir()) == [9, 8, 4]


def test_a_job_that_has_ended_resumes_with_its_last_state(tmp_path: Path) -> None:
    with run(tmp_path) as job:
        job.epoch()
    for _ in range(2):
        with run(tmp_path) as again:
            again.epoch()
            assert again.given == 0
            assert again.state == job.state


def test_a_job_that_has_ended_is_continued_with_more_data(tmp_path: Path) -> None:
    with run(tmp_path, every=100) as job:
        job.epoch()
    with run(tmp_path, every=100, stops=True) as more:
        more.epoch(stop=2 * STEPS)
        assert more.given == STEPS
        assert more.session.step_number == 2 * STEPS


class Uneven:
    """Ranks may have loaders of different lengths, whose last list is not full."""

    def __init__(self, length: int) -> None:
        self.data = [torch.full((1, 2), float(n)) for n in range(length)]

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return iter([(batch,) for batch in self.data])


def test_a_rank_with_fewer_batches_goes_on_behind_the_loop(tmp_path: Path) -> None:
    """The position in a checkpoint is that of rank 0."""
    with run(tmp_path, every=100) as job:
        job.epoch(Uneven(5), accumulate=2, partial=True)
    with run(tmp_path, every=100) as again:
        again.epoch(Uneven(4), accumulate=2, partial=True)
        assert again.given == 0
        assert again.state == job.state


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_loop_ends_no_call(raised: type[BaseException], tmp_path: Path) -> None:
    with run(tmp_path, every=100) as job, pytest.raises(raised):
        job.epoch(fails=raised)
    assert not complete(p.name for p in tmp_path.iterdir())


class Due:
    """A job whose checkpoints are due in the course of its loop, with an encoder that a step may
    move before its optimizer runs."""

    def __init__(self, folder: Path, every: int = 2) -> None:
        self.session, self.model = Session(Voting()), nn.Linear(4, 4)
        self.key = nn.Linear(4, 4).requires_grad_(False)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.session.register(model=[self.model, self.key], optimizer=self.optimizer)
        self.session.checkpoint(folder, every=every, keep=100)
        assert self.session._loop.saving is not None
        self.checkpoints = self.session._loop.saving.checkpoints

    @property
    def is_copied(self) -> bool:
        """Whether no checkpoint is being copied."""
        return self.checkpoints._staged is None

    def batches(self, count: int) -> Iterator[torch.Tensor]:
        return self.session.batches([torch.ones(4)] * count)

    def step(self, batch: torch.Tensor, act: Callable[[], None] = lambda: None) -> None:
        with self.session.step():
            self.optimizer.zero_grad()
            act()
            (self.model(batch) - self.key(batch)).square().sum().backward()
            self.optimizer.step()

    @torch.no_grad()
    def move(self) -> None:
        self.key.weight.mul_(0.9).add_(self.model.weight, alpha=0.1)


@pytest.mark.parametrize("moves", [False, True])
def test_a_state_that_changes_in_the_step_is_copied_before_it(moves: bool, tmp_path: Path) -> None:
    """A momentum encoder. Otherwise the copy is made while the step is computed."""
    job = Due(tmp_path)
    copied: list[bool] = []
    for batch in job.batches(5):
        if job.session.step_number == 2:
            copied.append(job.is_copied)
        job.step(batch, job.move if moves else lambda: None)
    job.checkpoints.close()
    assert copied == [moves]


def test_a_step_that_changes_parameters_for_the_first_time_misses_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was copied of it may be of its middle."""
    job = Due(tmp_path, every=6)
    for batch in job.batches(8):
        job.step(batch, job.move if job.session.step_number >= 6 else lambda: None)
    job.checkpoints.close()

    assert complete(p.name for p in tmp_path.iterdir()) == []
    assert "no checkpoint of step 6: parameters may have changed" in caplog.text


def test_a_state_is_copied_before_code_behind_a_broken_block_changes_it(tmp_path: Path) -> None:
    """The code runs after a broken step, too."""
    job, broken, copied = Due(tmp_path), list[int](), list[bool]()

    def breaks() -> None:
        if job.session.step_number == 2 and not broken:
            broken.append(2)
            raise Interrupted

    for batch in job.batches(4):
        job.step(batch, breaks)
        if broken and not copied:
            copied.append(job.is_copied)
    job.checkpoints.close()

    assert (broken, copied) == ([2], [True])
    assert complete(p.name for p in tmp_path.iterdir()) == [2]


def test_a_state_is_copied_when_the_loop_is_left(tmp_path: Path) -> None:
    """The script may change it afterwards."""
    job = Due(tmp_path)
    for batch in job.batches(4):
        if job.session.step_number == 2:
            break
        job.step(batch)
    copied = job.is_copied
    job.checkpoints.close()

    assert copied
    assert complete(p.name for p in tmp_path.iterdir()) == [2]


def test_a_process_that_ends_in_the_step_of_a_checkpoint_misses_it(tmp_path: Path) -> None:
    """Its script may have changed what was still to be copied."""
    job = Due(tmp_path)

    def ends() -> None:
        if job.session.step_number == 2:
            job.checkpoints.close()

    for batch in job.batches(3):
        job.step(batch, ends)

    assert complete(p.name for p in tmp_path.iterdir()) == []


def test_a_state_is_copied_before_an_evaluation_that_may_exchange_the_weights(
    tmp_path: Path,
) -> None:
    job, copied = Due(tmp_path), list[tuple[int, bool]]()
    evaluate = job.session.repeatable(
        lambda: copied.append((job.session.step_number, job.is_copied)), name="evaluate"
    )
    for batch in job.batches(3):
        job.step(batch)
        if job.session.step_number == 2:
            evaluate()
    job.checkpoints.close()

    assert copied == [(2, True)]
    assert complete(p.name for p in tmp_path.iterdir())


def test_a_checkpoint_before_a_function_that_the_script_has_no_longer_is_refused(
    tmp_path: Path,
) -> None:
    """By name, with the way to the checkpoint before. The function has been renamed, say."""
    job = Due(tmp_path)
    evaluate = job.session.repeatable(lambda: None, name="evaluate")
    for batch in job.batches(3):
        job.step(batch)
        if job.session.step_number == 2:
            evaluate()
    job.checkpoints.close()
    later = Due(tmp_path)
    later.session.repeatable(lambda: None, name="validate")

    with pytest.raises(StateMismatch, match=r"before evaluate\(\), .* step-00000002.refused"):
        next(iter(later.batches(3)))
