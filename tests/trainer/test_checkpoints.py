"""A rank's reports on its checkpoints."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
from torch import nn
from torch.optim import SGD

from tests.trainer.waiting import PATIENCE_S, wait_for
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint, complete
from tmd.trainer.checkpoints.checkpoints import (
    Checkpoints,
    CheckpointSchedule,
    Patience,
    WritingStage,
)
from tmd.trainer.checkpoints.naming import Names
from tmd.trainer.state.data import Position
from tmd.trainer.state.replicas import all_different
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.verification import StateVerdict

EVERY = 10
Reports = Queue[tuple[SavedCheckpoint | None, MissedCheckpoint | None]]


@pytest.fixture
def reports() -> Reports:
    """Each report on checkpoints, in order."""
    return Queue()


def checkpoints(
    folder: Path,
    reports: Reports,
    size: int = 1,
    verdict: StateVerdict = lambda: "",
    ending_s: float = PATIENCE_S,
    part_s: float = PATIENCE_S,
    *,
    at_end: bool = False,
) -> Checkpoints:
    model = nn.Linear(2, 1)
    registry = Registry({"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})
    names = Names(registry, all_different(size))
    order = CheckpointSchedule(folder, EVERY, 2, at_end)
    return Checkpoints(
        order,
        lambda: names,
        size,
        lambda *report: reports.put(report),
        lambda: verdict,
        patience=Patience(ending_s, part_s),
    )


def test_a_hook_of_a_state_dict_is_not_called() -> None:
    """It may gather from other ranks, which are elsewhere when this rank names its state."""

    def gather(*_: object) -> None:
        raise AssertionError("the hook was called")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_state_dict_post_hook(gather)
    registry = Registry({"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})
    names = Names(registry, all_different(1))

    beside = {path for path in names.besides(0) if path[0] == "model"}
    assert beside == {
        ("model", f"1.{name}") for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def due(of: Checkpoints, step: int, rank: int = 0) -> None:
    of.at_boundary(step, Position(0, step), rank, seed=1)
    of.settle()


def test_the_wait_for_a_last_part_ends_with_a_loss_and_goes_on_after_the_repair(
    tmp_path: Path, reports: Reports
) -> None:
    """The survivors must reach their vote. The part is not copied a second time."""
    known, lost = threading.Event(), threading.Event()
    of = checkpoints(tmp_path, reports, verdict=once(known), at_end=True)
    looked = threading.Event()

    def broken() -> bool:
        looked.set()
        return lost.is_set()

    def end() -> None:
        of.at_end(7, Position(0, 7, exhausted=True), 0, 1, broken)

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(end)
        assert looked.wait(PATIENCE_S)
        lost.set()
        waiting.result(PATIENCE_S)
        assert reports.empty()
        lost.clear()
        looked.clear()
        waiting = threads.submit(end)
        assert looked.wait(PATIENCE_S)
        known.set()
        waiting.result(PATIENCE_S)
    over()
    assert next_report(reports) == (7, None)
    assert reports.empty()


def over() -> None:
    """Wait until no thread writes."""
    for thread in threading.enumerate():
        if thread.name == "tmd-checkpoint":
            thread.join(PATIENCE_S)


def once(known: threading.Event) -> StateVerdict:
    """The state is proved once that is ``known``; nothing is written before."""

    def verdict() -> str:
        assert known.wait(PATIENCE_S)
        return ""

    return verdict


def next_report(reports: Reports) -> tuple[int | None, MissedCheckpoint | None]:
    saved, missed = reports.get(timeout=PATIENCE_S)
    return None if saved is None else saved.step, missed


def test_a_failed_checkpoint_is_reported_until_a_later_one_is_complete(
    tmp_path: Path, reports: Reports
) -> None:
    """With the reason, and the number of misses in a row."""
    folder = tmp_path / "c"
    folder.write_text("no folder")
    of = checkpoints(folder, reports)
    found = []
    for step in (10, 20):
        due(of, step)
        over()
        found.append(next_report(reports))
    folder.unlink()
    folder.mkdir()
    due(of, 30)
    whole = next_report(reports)
    of.close()

    assert [(s, m.step, m.count) for s, m in found if m] == [(None, 10, 1), (None, 20, 2)]
    assert all(m and "Not a directory" in m.reason for _, m in found)
    assert whole == (30, None)


def test_a_skipped_checkpoint_is_reported_despite_an_older_complete_one(
    tmp_path: Path, reports: Reports
) -> None:
    """The previous one was still being written; its later completion does not end this miss."""
    goes_on = threading.Event()
    of = checkpoints(tmp_path, reports, verdict=once(goes_on))
    due(of, 10)
    due(of, 20)
    left_out = next_report(reports)
    goes_on.set()
    before = next_report(reports)
    over()
    due(of, 30)
    later = next_report(reports)
    of.close()

    missed = MissedCheckpoint(20, "the previous checkpoint is still being written", 1)
    assert (left_out, before, later) == ((None, missed), (10, missed), (30, None))


def test_a_process_that_ends_writes_its_part_first(tmp_path: Path, reports: Reports) -> None:
    """However long it waits for others."""
    goes_on = threading.Event()
    of = checkpoints(tmp_path, reports, verdict=once(goes_on), ending_s=0.0)
    due(of, 10)
    ending = threading.Thread(target=of.close)
    ending.start()
    ending.join(0.5)
    waits = ending.is_alive()
    goes_on.set()
    ending.join(PATIENCE_S)

    assert waits
    assert next_report(reports) == (10, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_the_part_of_a_dead_rank(
    tmp_path: Path, reports: Reports, rank: int
) -> None:
    """The other ranks have written theirs and report nothing."""
    of = checkpoints(tmp_path, reports, size=3)
    due(of, 10, rank)
    written = tmp_path / "step-00000010.partial" / f"part-{rank}"
    wait_for(written.exists)
    wait_for(lambda: of._reached >= WritingStage.WAITS)
    due(of, 20, rank)
    wait_for((tmp_path / "step-00000020.partial" / f"part-{rank}").exists)

    if rank == 0:
        assert next_report(reports) == (
            None,
            MissedCheckpoint(10, "no part of rank 1, 2 in time", 1),
        )
    assert reports.empty()
    ending = threading.Thread(target=of.close)
    ending.start()
    of._attempt.over.set()
    ending.join(PATIENCE_S)


def test_an_unverified_state_is_not_written(tmp_path: Path, reports: Reports) -> None:
    """The verdict comes after the copy; then the part is written, or never."""
    verdicts: Queue[str] = Queue()
    of = checkpoints(tmp_path, reports, verdict=verdicts.get)
    due(of, 10)
    before = list(tmp_path.glob("*/*"))
    verdicts.put("source and joiner have different states")
    refused = next_report(reports)
    over()
    due(of, 20)
    verdicts.put("")
    written = next_report(reports)
    of.close()

    assert before == []
    assert refused == (None, MissedCheckpoint(10, "source and joiner have different states", 1))
    assert written == (20, None)


def test_the_next_holder_of_the_rank_writes_the_part(tmp_path: Path, reports: Reports) -> None:
    """It may be the same worker, with a verified state, in the same step."""
    verdicts = iter(["source and joiner have different states", ""])
    of = checkpoints(tmp_path, reports, verdict=lambda: next(verdicts))
    due(of, 10)
    next_report(reports)
    over()
    due(of, 10)
    written = next_report(reports)
    of.close()

    assert written == (10, None)


def test_the_end_of_a_loop_gives_others_time_for_the_checkpoint_before(
    tmp_path: Path, reports: Reports
) -> None:
    """They are about as far, but may be on a slower disk."""
    ranks = [checkpoints(tmp_path, reports, size=2, at_end=True) for _ in range(2)]
    due(ranks[0], 10)
    wait_for(lambda: ranks[0]._reached is WritingStage.WAITS)
    asked = threading.Event()

    def end(rank: int) -> None:
        of = ranks[rank]
        of.at_end(12, Position(0, 12, exhausted=True), rank, 1, lambda: asked.set() or False)
        of.close()

    with ThreadPoolExecutor() as threads:
        first = threads.submit(end, 0)
        assert asked.wait(PATIENCE_S)
        due(ranks[1], 10, rank=1)
        threads.submit(end, 1).result(PATIENCE_S)
        first.result(PATIENCE_S)

    assert complete(os.listdir(tmp_path)) == [12, 10]
    assert all(missed is None for _, missed in reports.queue)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_does_not_wait_for_good_for_the_part_of_a_lost_rank(
    tmp_path: Path, reports: Reports, rank: int
) -> None:
    """It may have given its rank away, so that no later checkpoint of its own ends the wait."""
    of = checkpoints(tmp_path, reports, size=3, part_s=0.0)
    due(of, 10, rank)
    wait_for(lambda: of._reached is WritingStage.ENDED)

    assert (tmp_path / "step-00000010.partial" / f"part-{rank}").is_dir()
    if rank == 0:
        assert next_report(reports)[1] == MissedCheckpoint(10, "no part of rank 1, 2 in time", 1)
    of.close()


def test_a_state_on_disk_is_not_kept_in_memory(tmp_path: Path, reports: Reports) -> None:
    """Other ranks may write for hours, or this worker build objects for another rank meanwhile."""
    of = checkpoints(tmp_path, reports, size=2, ending_s=0.1)
    of.at_boundary(10, Position(0, 10), 0, seed=1)
    staged = of._staged
    of.settle()
    wait_for(lambda: of._reached is WritingStage.WAITS)
    of.close()

    assert staged is not None
    assert not staged.live
    assert not staged.copies


def test_the_parts_of_missed_checkpoints_are_removed(tmp_path: Path, reports: Reports) -> None:
    """Before the next one is written: the disk may have no room for both."""
    of = checkpoints(tmp_path, reports, size=2, ending_s=0.1)
    seen = []
    for step in (10, 20, 30):
        due(of, step)
        wait_for((tmp_path / f"step-{step:08}.partial" / "part-0").exists)
        wait_for(lambda: of._reached is WritingStage.WAITS)
        seen.append(sorted(place.name for place in tmp_path.iterdir()))
    of.close()

    assert seen == [[f"step-{step:08}.partial"] for step in (10, 20, 30)]


def test_the_same_worker_writes_the_part_of_another_rank(tmp_path: Path, reports: Reports) -> None:
    """It has got that rank at the step at which it began the part of its former one."""
    of = checkpoints(tmp_path, reports, size=3, ending_s=0.1)
    for rank in (0, 2):
        due(of, 10, rank)
        wait_for(lambda: of._reached is WritingStage.WAITS)
    of.close()

    parts = sorted(part.name for part in tmp_path.glob("*/part-*"))
    assert parts == ["part-0", "part-2"]


def test_a_boundary_does_not_wait_for_a_disk(tmp_path: Path, reports: Reports) -> None:
    """The thread of the checkpoint before may stand at one."""
    goes_on = threading.Event()
    of = checkpoints(tmp_path, reports, size=2)
    due(of, 10)
    wait_for((tmp_path / "step-00000010.partial" / "part-0").exists)
    wait_for(lambda: of._reached is WritingStage.WAITS)
    stands = threading.Thread(target=goes_on.wait, args=(PATIENCE_S,), name="stands")
    stands.start()
    of._thread = stands
    due(of, 20)
    stood = stands.is_alive()
    goes_on.set()
    of._attempt.over.set()
    over()

    assert stood


def test_rank_0_does_not_give_up_a_part_that_is_being_written(
    tmp_path: Path, reports: Reports
) -> None:
    """Another rank takes a little longer than the interval. If rank 0 gave up each checkpoint that
    the other one writes, none would ever be complete."""
    other: Reports = Queue()
    fast, slow = checkpoints(tmp_path, reports, size=2), checkpoints(tmp_path, other, size=2)
    slow.at_boundary(10, Position(0, 10), 1, seed=1)  # its part is written once it is settled
    wait_for(lambda: any(tmp_path.glob("step-00000010.partial/part-1.*.writing")))
    due(fast, 10)
    wait_for(lambda: fast._reached is WritingStage.OTHERS_WRITE)
    due(fast, 20)
    left_out = next_report(reports)
    slow.settle()
    complete_now = next_report(reports)
    fast.close()
    slow.close()

    missed = MissedCheckpoint(20, "the previous checkpoint is still being written", 1)
    assert (left_out, complete_now) == ((None, missed), (10, missed))
    assert os.listdir(tmp_path) == ["step-00000010"]


def test_a_rank_without_threads_misses_only_its_checkpoint(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the number of processes is reached. The process ends as usual, too."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    of = checkpoints(tmp_path, reports)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        due(of, 10)
    failed = next_report(reports)
    due(of, 20)
    written = next_report(reports)
    of.close()

    assert failed == (None, MissedCheckpoint(10, "can't start new thread", 1))
    assert written == (20, None)


def test_a_rank_whose_script_fails_does_not_wait_long_for_others(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced once its process is gone. One that has come to its end waits."""
    patient = checkpoints(tmp_path, reports, size=2, ending_s=0.1, at_end=True)
    due(patient, 10)
    wait_for(lambda: patient._reached is WritingStage.WAITS)
    waiting = threading.Thread(target=patient.close)
    waiting.start()
    waiting.join(1)
    still = waiting.is_alive()

    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    failed = checkpoints(tmp_path / "2", reports, size=2, ending_s=0.1, at_end=True)
    due(failed, 10)
    wait_for(lambda: failed._reached is WritingStage.WAITS)
    ending = threading.Thread(target=failed.close)
    ending.start()
    ending.join(PATIENCE_S)
    ended = not ending.is_alive()
    patient._attempt.over.set()
    waiting.join(PATIENCE_S)

    assert (still, ended) == (True, True)
