"""What hosts have stored of themselves, read one by one: one that is of a later version spoils no
other, as long as its name can be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from tmd.core.model import HostStatus
from tmd.core.unreadable import UNREADABLE
from tmd.daemon.codec import decoded


class Named(Struct, frozen=True):
    """As much as every version says."""

    host: str


def read_hosts(
    values: Iterable[bytes], known: Mapping[bytes, HostStatus]
) -> tuple[dict[bytes, HostStatus], tuple[str, ...]]:
    """The statuses by their stored form, and the names of hosts whose words are not understood.
    ``known``: what was read before and need not be read again.

    Raises:
        StoreUnavailable: it is not even known whose words one is.
    """
    found: dict[bytes, HostStatus] = {}
    unread = []
    for value in values:
        try:
            found[value] = known[value] if value in known else _status(value)
        except UNREADABLE:
            unread.append(decoded(value, Named).host)
    return found, tuple(sorted(unread))


def _status(value: bytes) -> HostStatus:
    return msgspec.json.decode(value, type=HostStatus)
