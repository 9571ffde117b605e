"""Decoding the stored host statuses."""

from __future__ import annotations

import pytest

from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.statuses import read_hosts

PLAIN = b'{"host":"h1","incarnation":"i"}'
LATER = b'{"host":"h2","incarnation":"i","workers":"as many as stars"}'


def test_an_undecodable_status_is_named_and_others_are_read() -> None:
    read = read_hosts([("h1", PLAIN), ("h2", LATER)], {})

    assert [status.host for status in read.found.values()] == ["h1"]
    assert read.unread == ("h2",)


def test_a_status_stored_under_another_host_is_ignored() -> None:
    read = read_hosts([("h3", PLAIN), ("h4", LATER)], {})

    assert (read.found, read.unread, read.misplaced) == ({}, (), (PLAIN, LATER))


@pytest.mark.parametrize(
    "strange", [b"", b"\x80\x04", b"[" * 10_000, b"[]", b'{"incarnation":"i"}']
)
def test_a_status_without_a_host_name_stops_decisions(strange: bytes) -> None:
    """It may belong to any host: a clear error, not a crash."""
    with pytest.raises(StoreUnavailable, match="this version cannot decode"):
        read_hosts([("h1", PLAIN), ("h2", strange)], {})
