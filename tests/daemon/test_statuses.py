"""What hosts have stored of themselves."""

from __future__ import annotations

import pytest

from tmd.core.errors import StoreUnavailable
from tmd.daemon.statuses import read_hosts

PLAIN = b'{"host":"h1","incarnation":"i"}'
LATER = b'{"host":"h2","incarnation":"i","workers":"as many as stars"}'


def test_one_that_is_not_understood_is_named() -> None:
    """The others are read."""
    found, unread = read_hosts([PLAIN, LATER], {})

    assert [status.host for status in found.values()] == ["h1"]
    assert unread == ("h2",)


@pytest.mark.parametrize(
    "strange", [b"", b"\x80\x04", b"[" * 10_000, b"[]", b'{"incarnation":"i"}']
)
def test_nothing_is_decided_on_hosts_without_a_name(strange: bytes) -> None:
    """It may be any: a clear error, not a crash."""
    with pytest.raises(StoreUnavailable, match="this version cannot read"):
        read_hosts([PLAIN, strange], {})
