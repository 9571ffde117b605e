"""What hosts have stored of themselves, read one by one: one that is of a later version spoils no
other, as long as its name can be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import HostStatus
from tmd.daemon.codec import decoded


class Named(Struct, frozen=True):
    """As much as every version says."""

    host: str


class Statuses(NamedTuple):
    found: dict[bytes, HostStatus]
    """By their stored form."""
    unread: tuple[str, ...]
    """Hosts of a version whose statuses are not understood here."""
    misplaced: tuple[bytes, ...]
    """Texts stored for another host than the one that they are about."""


def read_hosts(values: Iterable[tuple[str, bytes]], known: Mapping[bytes, HostStatus]) -> Statuses:
    """What the texts that are stored for hosts say. A text that names another host than the one
    it is stored for is left out. ``known``: what was read before and need not be read again.

    Raises:
        StoreUnavailable: it is not even known which host a text is about.
    """
    found: dict[bytes, HostStatus] = {}
    unread, misplaced = [], []
    for name, value in values:
        try:
            status = known[value] if value in known else _status(value)
            about = status.host
        except UNREADABLE:
            about = decoded(value, Named).host
            if about == name:
                unread.append(name)
        else:
            if about == name:
                found[value] = status
        if about != name:
            misplaced.append(value)
    return Statuses(found, tuple(sorted(unread)), tuple(misplaced))


def _status(value: bytes) -> HostStatus:
    return msgspec.json.decode(value, type=HostStatus)
