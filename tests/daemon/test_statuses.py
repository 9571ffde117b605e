"""Decoding the stored host statuses."""

from __future__ import annotations

import pytest

from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.statuses import StatusReader

PLAIN = b'{"host":"h1","incarnation":"i"}'
LATER = b'{"host":"h2","incarnation":"i","workers":"as many as stars"}'


def test_an_undecodable_status_is_named_and_others_are_read() -> None:
    read = StatusReader().read([("h1", PLAIN), ("h2", LATER)])

    assert [status.host for status in read.hosts] == ["h1"]
    assert read.unread == ("h2",)


def test_a_status_stored_under_another_host_is_ignored() -> None:
    misplaced: list[bytes] = []
    read = StatusReader(misplaced.append).read([("h3", PLAIN), ("h4", LATER)])

    assert (read.hosts, read.unread, misplaced) == ((), (), [PLAIN, LATER])


@pytest.mark.parametrize(
    "strange", [b"", b"\x80\x04", b"[" * 10_000, b"[]", b'{"incarnation":"i"}']
)
def test_a_status_without_a_host_name_stops_decisions(strange: bytes) -> None:
    """It may belong to any host: a clear error, not a crash."""
    with pytest.raises(StoreUnavailable, match="this version cannot decode"):
        StatusReader().read([("h1", PLAIN), ("h2", strange)])


def test_hosts_that_are_left_out_are_as_they_were_read_last() -> None:
    """As long as they are there, also those that cannot be decoded."""
    reader = StatusReader()
    reader.read([("h1", PLAIN), ("h2", LATER), ("h3", None)])
    assert reader.new(["h1", "h2", "h3", "h4"]) == ["h3", "h4"]  # h3 was forged
    assert reader.unverified == ["h3"]

    read = reader.read([], others=["h1", "h2"])
    assert ([status.host for status in read.hosts], read.unread) == (["h1"], ("h2",))
    assert reader.read([], others=["h2"]).hosts == ()
    assert reader.new(["h1"]) == ["h1"]
