"""Which checkpoint a job resumes from, and what its choice leaves in the folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import json

from tmd.core.values.checkpoints import PARTIAL, REFUSED, name_of
from tmd.core.values.errors import ConfigError
from tmd.trainer.checkpoints.archive import ABSENT, SEAL, CheckpointSeal, flaw
from tmd.trainer.checkpoints.resuming import chosen
from tmd.trainer.state.data import Position


def alone(answer: str) -> Sequence[str]:
    """Exchanges a string among the only rank."""
    return [answer]


def damaged(folder: Path, *steps: int) -> None:
    """Checkpoints without any file."""
    for step in steps:
        (folder / name_of(step)).mkdir()


def test_a_refused_start_removes_nothing(tmp_path: Path) -> None:
    damaged(tmp_path, 10, 20, 30)
    (tmp_path / (name_of(40) + PARTIAL)).mkdir()
    before = sorted(os.listdir(tmp_path))

    with pytest.raises(ConfigError, match="earlier run, up to step 30"):
        chosen(tmp_path, 0, alone, resume=False)

    assert sorted(os.listdir(tmp_path)) == before


def test_a_job_with_only_damaged_checkpoints_does_not_start_from_scratch(tmp_path: Path) -> None:
    """Neither at the first attempt, which renames them, nor when it is started again."""
    damaged(tmp_path, 10, 20)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
            chosen(tmp_path, 0, alone, resume=True)
        assert sorted(os.listdir(tmp_path)) == [name_of(10) + REFUSED, name_of(20) + REFUSED]

    assert chosen(tmp_path, 0, alone, resume=False).step is None


def test_a_checkpoint_that_may_not_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job does not start, and nothing is renamed."""

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    damaged(tmp_path, 10, 20)
    # Root may read every file.
    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(
        ConfigError, match=f"Permission denied: .*{name_of(20)}.*: let the user of this job"
    ):
        chosen(tmp_path, 0, alone, resume=True)

    assert sorted(os.listdir(tmp_path)) == [name_of(10), name_of(20)]


@pytest.mark.parametrize(
    "code", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.EMFILE, errno.ENOMEM]
)
def test_an_error_that_passes_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The file server may have been away for a moment. Nothing is renamed."""

    def away(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    damaged(tmp_path, 10, 20)
    monkeypatch.setattr(Path, "read_bytes", away)
    with pytest.raises(ConfigError, match=f"{name_of(20)} cannot be read now: .*start the job"):
        chosen(tmp_path, 0, alone, resume=True)

    assert sorted(os.listdir(tmp_path)) == [name_of(10), name_of(20)]


def test_a_step_can_be_damaged_again_in_a_later_run(tmp_path: Path) -> None:
    damaged(tmp_path, 20)
    (tmp_path / (name_of(20) + REFUSED)).mkdir()
    (tmp_path / (name_of(20) + REFUSED) / "part-0").touch()

    with pytest.raises(ConfigError, match="are damaged"):
        chosen(tmp_path, 0, alone, resume=True)

    assert os.listdir(tmp_path) == [name_of(20) + REFUSED]
    assert not os.listdir(tmp_path / (name_of(20) + REFUSED))


def test_a_last_checkpoint_that_cannot_be_renamed_is_named(tmp_path: Path) -> None:
    damaged(tmp_path, 20)
    (tmp_path / (name_of(20) + REFUSED)).touch()

    with pytest.raises(ConfigError, match=r"cannot rename the damaged .*20"):
        chosen(tmp_path, 0, alone, resume=True)


def test_all_ranks_hear_that_a_damaged_checkpoint_cannot_be_renamed(tmp_path: Path) -> None:
    damaged(tmp_path, 10, 20)
    (tmp_path / (name_of(20) + REFUSED)).touch()
    answers: list[str] = []

    def first(answer: str) -> Sequence[str]:
        answers.append(answer)
        return [answer, ""]

    with pytest.raises(ConfigError, match="cannot rename the damaged"):
        chosen(tmp_path, 0, first, resume=True)

    said = iter(answers)
    with pytest.raises(ConfigError, match="cannot rename the damaged"):
        chosen(tmp_path, 1, lambda _: [next(said), ""], resume=True)


def test_an_error_of_the_file_server_is_no_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where ``Path.exists`` hides it, as from Python 3.14 on."""
    damaged(tmp_path, 10)
    seal = CheckpointSeal(10, Position(), 1, {"part-0/a": (1, "0")})
    (tmp_path / name_of(10) / SEAL).write_bytes(json.encode(seal))
    asked = []

    def stat(path: Path, **more: object) -> os.stat_result:
        if path.name == "a":
            asked.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return os.stat(path)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "exists", os.path.exists)
    with pytest.raises(ConfigError, match=f"{name_of(10)} cannot be read now: .*start the job"):
        chosen(tmp_path, 0, alone, resume=True)

    assert asked
    assert sorted(os.listdir(tmp_path)) == [name_of(10)]


def test_a_listing_shows_a_checkpoint_that_a_client_of_nfs_holds_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked for it in vain not long ago, before rank 0 gave it its name."""
    damaged(tmp_path, 10)
    listed = []
    listing = os.listdir

    def listdir(path: Path) -> list[str]:
        listed.append(path)
        return listing(path)

    def stat(path: Path, **more: object) -> os.stat_result:
        if path.name == name_of(10) and not listed:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return os.stat(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(Path, "stat", stat)

    assert flaw(tmp_path, 10).startswith(f"{SEAL} cannot be read: ")


def test_a_folder_that_a_host_does_not_have_is_another_folder(tmp_path: Path) -> None:
    """Its file server is not mounted there: to start the job again would not help."""
    assert flaw(tmp_path / "nowhere", 10) == ABSENT


def test_all_ranks_know_the_run_from_rank_0(tmp_path: Path) -> None:
    answers: list[str] = []

    def first(answer: str) -> Sequence[str]:
        answers.append(answer)
        return [answer, ""]

    of_rank_0 = chosen(tmp_path, 0, first, resume=True)
    of_rank_1 = chosen(tmp_path, 1, lambda _: [answers.pop(0), ""], resume=True)

    assert of_rank_0.run
    assert of_rank_0 == of_rank_1
