"""What each release stored and sent is still read, with nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden.generate import KEY, MESSAGES, RECORDS
from tmd import __version__, wire
from tmd.core.values.model import JobRecord
from tmd.daemon.codec import Codec
from tmd.daemon.job_records import read_record

HERE = Path(__file__).parent
FILES = sorted(file for file in HERE.glob("*/*") if file.suffix in (".sealed", ".frame"))
KINDS = {kind.__name__: kind for kind in (*RECORDS, *MESSAGES)}


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """Parts of ``before`` that ``after`` does not have."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            each
            for name, value in before.items()
            for each in lost(value, after.get(name), f"{where}.{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [each for n, (old, new) in pairs for each in lost(old, new, f"{where}[{n}]")]
    return [] if before == after else [f"{where}: {before!r} became {after!r}"]


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.suffix == ".sealed"], ids=lambda f: f"{f.parent.name}/{f.stem}"
)
def test_a_stored_value_is_read(file: Path) -> None:
    """Its seal, every field, every value of an enumeration."""
    codec, kind = Codec(KEY, ""), KINDS[file.stem]
    for line in file.read_bytes().splitlines():
        found = codec.opened(line, kind)

        assert found is not None
        now = msgspec.json.decode(msgspec.json.encode(found))
        assert lost(msgspec.json.decode(line.partition(b" ")[2]), now) == []


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.suffix == ".frame"], ids=lambda f: f"{f.parent.name}/{f.stem}"
)
def test_a_message_is_read(file: Path) -> None:
    """A trainer outlives the daemon that it was started with."""
    for line in file.read_text().splitlines():
        frame = bytes.fromhex(line)
        header, body = frame[: wire.HEADER_SIZE], frame[wire.HEADER_SIZE :]
        found = wire.decode(body)
        now = msgspec.msgpack.decode(wire.encode(found)[wire.HEADER_SIZE :])

        assert wire.body_size(header) == len(body)
        assert type(found) is KINDS[file.stem]
        assert lost(msgspec.msgpack.decode(body), now) == []


def test_a_record_of_each_release_may_be_decided_upon() -> None:
    """None of them is taken for one of a later version."""
    codec = Codec(KEY, "")
    for file in HERE.glob("*/JobRecord.sealed"):
        for line in file.read_bytes().splitlines():
            body = codec.body(line, JobRecord)
            record = None if body is None else read_record(body)

            assert isinstance(record, JobRecord)


def test_this_release_has_its_files() -> None:
    """``python -m tests.golden.generate tests/golden/VERSION`` writes them at a release."""
    names = {file.stem for file in (HERE / __version__).iterdir()}

    assert len(names) >= 20
    assert names <= KINDS.keys()


def test_a_renamed_field_would_be_noticed() -> None:
    assert lost({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{"d": 2}], "e": 3}) == [
        ".b[0].c: 2 became None"
    ]
