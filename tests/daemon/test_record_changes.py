"""Changes of a record: they make the new text exactly, are short, and no text of others harms."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.large_jobs import LargeJob
from tmd.daemon.record_changes import (
    BLOCK,
    LONGEST_CHANGE,
    LONGEST_TEXT,
    applied,
    difference,
)

SHORT = 6_000
"""Bytes of the change by which the eight ranks of a host move or are lost."""


@st.composite
def texts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """An old and a new text of pieces of which they have many in common, some more than once."""
    pieces = draw(st.lists(st.binary(max_size=3 * BLOCK), min_size=1, max_size=6))
    pieces += [piece * 40 for piece in pieces[:2]]
    old, new = (draw(st.lists(st.sampled_from(pieces), max_size=20)) for _ in range(2))
    edits = draw(st.lists(st.tuples(st.integers(0, 5_000), st.binary(max_size=4)), max_size=4))
    text = b"".join(new)
    for at, edit in edits:
        text = text[:at] + edit + text[at + 1 :]
    return b"".join(old), text


@given(texts())
def test_the_change_between_two_texts_makes_the_new_one(both: tuple[bytes, bytes]) -> None:
    old, new = both
    change = difference(old, new)

    assert change is None or applied(old, change) == new
    assert change is None or len(change) <= len(new) // 2


@given(st.binary(max_size=4_000), st.binary(max_size=4_000))
def test_any_two_texts_have_a_change_or_none(old: bytes, new: bytes) -> None:
    change = difference(old, new)

    assert change is None or applied(old, change) == new


def test_a_piece_that_moved_is_copied() -> None:
    """A plan repeats the membership of its record."""
    members = b"".join(b'{"worker":"h%d"},' % number for number in range(1_000))
    old = b"[" + members + b"]"
    change = difference(old, b"{old:" + old + b",new:" + old + b"}")

    assert change is not None
    assert len(change) < 50


def test_a_text_of_its_own_is_no_change() -> None:
    """It would be as long as the text, and looking for it to the end would take seconds."""
    old, new = (b"%d," * 300_000 % tuple(range(n, n + 300_000)) for n in (10**6, 10**8))

    assert difference(old, new) is None
    assert difference(b"", new) is None


def test_very_many_small_changes_are_none() -> None:
    """It stops at the limit: the scripts would not pass on a longer one."""
    old = b"".join(b"%0200d" % number for number in range(20_000))
    new = b"".join(b"%0200d" % (number * 7) for number in range(20_000))

    assert difference(old, new) is None


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 11)],
        [(10, 1)],
        [(-1, 2)],
        [(2, -1)],
        [(2**62, 2**62)],
        [(0, 2**63)],
        [(0, 1, 2)],
        [(0,)],
        [(True, 1)],
        ["text"],
        [None],
        {},
        7,
    ],
    ids=str,
)
def test_a_change_that_does_not_fit_makes_nothing(parts: object) -> None:
    assert applied(b"0123456789", msgspec.msgpack.encode(parts)) is None


def test_a_change_makes_no_longer_text_than_a_record_may_have() -> None:
    copies = [(0, 1024)] * (LONGEST_TEXT // 1024)
    made = applied(bytes(1024), msgspec.msgpack.encode(copies))

    assert made == bytes(LONGEST_TEXT)
    assert applied(bytes(1024), msgspec.msgpack.encode([*copies, (0, 1)])) is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_of_others_raise_an_error(old: bytes, change: bytes) -> None:
    made = applied(old, change)

    assert made is None or len(made) <= LONGEST_TEXT


@pytest.mark.parametrize("ranks", [1_024, 16_384])
def test_what_a_plan_changes_is_short_in_a_large_job(ranks: int) -> None:
    """Each phase of a planned move, of a failover, and of one in which ranks are adopted."""
    job, shrinks = LargeJob(ranks), LargeJob(ranks, spare=0)
    stories = [
        (job, job.move(job.hosts[1])),
        (job, job.lose(job.hosts[3])),
        (shrinks, shrinks.lose(shrinks.hosts[3])),
    ]
    found = []
    for subject, story in stories:
        old = msgspec.json.encode(subject.record)
        for record in story:
            new = msgspec.json.encode(record)
            change = difference(old, new)
            assert change is not None
            assert applied(old, change) == new
            found.append(len(change))
            old = new

    assert shrinks.record.membership.adopted
    assert len(found) == 12
    assert max(found) < SHORT < LONGEST_CHANGE
