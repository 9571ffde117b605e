"""Decodes the stored host statuses one by one: one of a later version does not affect the
others, as long as its host name can be decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import HostStatus
from tmd.daemon.codec import decoded


class Named(Struct, frozen=True):
    """The fields that every version has."""

    host: str


class Statuses(NamedTuple):
    found: dict[bytes, HostStatus]
    """By their stored form."""
    unread: tuple[str, ...]
    """Hosts whose status this version cannot decode."""
    misplaced: tuple[bytes, ...]
    """Texts stored under another host's name."""


def read_hosts(values: Iterable[tuple[str, bytes]], known: Mapping[bytes, HostStatus]) -> Statuses:
    """Decode the texts stored for hosts. A text that names another host than the one it is stored
    for is skipped. ``known``: texts decoded earlier.

    Raises:
        StoreUnavailable: a text does not even name its host.
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
