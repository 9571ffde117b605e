"""What detectors keep until the host boots again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tmd_detectors.kept import KeptFile, KeptUntilBoot, recall

from tmd.plugin import Signal, State


class Number(KeptUntilBoot, frozen=True):  # type: ignore[misc, call-arg]
    number: int = 0


@pytest.mark.parametrize(
    "text", [b"{half", b"[]", b"[" * 100_000, b'{"boot":"\xff\xfe","number":1}', b""]
)
def test_a_file_that_cannot_be_read_is_an_empty_memory(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "kept.json"
    file.write_bytes(text)

    assert recall(file, Number, "this") == Number("this")


def test_a_value_is_saved_when_it_changes(tmp_path: Path) -> None:
    file = KeptFile(tmp_path / "kept.json", Number, "x.not_kept", "it may be lost")
    signals = [*file.keep(Number(number=1)), *file.keep(Number(number=1))]
    again = KeptFile(tmp_path / "kept.json", Number, "x.not_kept", "it may be lost")

    assert signals == []
    assert again.memory.number == 1


def test_a_disk_that_hangs_is_a_finding_and_holds_no_detector_up(tmp_path: Path) -> None:
    """The daemon sends its heartbeats on. A pipe that nobody reads hangs as well."""
    file = KeptFile(tmp_path / "kept.json", Number, "x.not_kept", "it may be lost")
    pipe = tmp_path / "kept.new"
    os.mkfifo(pipe)
    (raised,) = file.keep(Number(number=1))
    assert [*file.keep(Number(number=2))] == []
    with pipe.open("rb") as reader:
        reader.read()
    cleared: list[Signal] = []
    while not cleared:
        cleared += file.keep(Number(number=2))

    assert raised.message.endswith("kept.json: the disk does not answer")
    assert [signal.state for signal in cleared] == [State.CLEARED]
    assert KeptFile(tmp_path / "kept.json", Number, "x", "y").memory.number == 2


@pytest.mark.parametrize("then", [1, 0], ids=["it can be written", "nothing is to be written"])
def test_a_value_that_cannot_be_saved_is_a_finding_until_the_file_is_right(
    tmp_path: Path, then: int
) -> None:
    folder = tmp_path / "later"
    file = KeptFile(folder / "kept.json", Number, "x.not_kept", "it may be lost")
    (raised,) = file.keep(Number(number=1))
    folder.mkdir()
    (cleared,) = file.keep(Number(number=then))

    assert (raised.code, raised.state) == ("x.not_kept", State.RAISED)
    assert raised.message.startswith(f"it may be lost: {folder}")
    assert (cleared.code, cleared.state) == ("x.not_kept", State.CLEARED)
