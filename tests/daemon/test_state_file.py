"""Small files in the state folder, on disks that work, fail and hang."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tmd.daemon.state_file import StateFile
from tmd.testing.clients import until


def test_the_latest_data_replace_the_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "kept.json", "a test")
    file.write(b"1")
    file.write(b"2")

    assert file.path.read_bytes() == b"2"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.json"]


def test_an_error_of_the_disk_is_contained(tmp_path: Path) -> None:
    """The next data are written again."""
    file = StateFile(tmp_path / "gone" / "kept.json", "a test")
    file.write(b"1")
    file.path.parent.mkdir()
    file.write(b"2")

    assert file.path.read_bytes() == b"2"


def test_a_value_is_written_only_if_it_is_another_one(tmp_path: Path) -> None:
    """Than the one that was read, and than the one written last."""
    place = tmp_path / "kept.json"
    place.write_bytes(b"[1]")
    file = StateFile(place, "a test")
    known = file.read(list[int], [])
    place.unlink()
    file.keep(known)
    before = place.exists()
    file.keep([1, 2])
    written = place.read_bytes()
    place.unlink()
    file.keep([1, 2])

    assert not before
    assert written == b"[1,2]"
    assert not place.exists()


async def test_what_a_full_disk_did_not_take_is_written_once_it_can_be(tmp_path: Path) -> None:
    """Only the newest data, and only once."""
    file = StateFile(tmp_path / "gone" / "kept.json", "a test")
    file.write(b"1")
    file.write(b"2")
    file.path.parent.mkdir()
    await until(lambda: file.write_again() or file.path.is_file(), within_s=30)
    written = file.path.read_bytes()
    await until(lambda: file._thread is None, within_s=30)
    file.path.unlink()
    file.write_again()

    assert written == b"2"
    assert file._thread is None
    assert not file.path.exists()


async def test_data_for_which_no_thread_can_be_had_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of the host's processes."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = StateFile(tmp_path / "kept.json", "a test")
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        file.write(b"1")
        file.write(b"2")
    await until(lambda: file.write_again() or file.path.is_file(), within_s=30)

    assert file.path.read_bytes() == b"2"


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """What was newest when it answers again is written. A pipe that nobody reads hangs as well."""
    file = StateFile(tmp_path / "kept.json", "a test")
    pipe = tmp_path / "kept.new"
    os.mkfifo(pipe)
    for data in (b"1", b"2", b"3"):
        file.write(data)
    before = file.path.exists()
    with pipe.open("rb") as reader:
        first = reader.read()
    await until(lambda: file.path.is_file() and file.path.read_bytes() == b"3", within_s=30)

    assert not before
    assert first == b"1"
