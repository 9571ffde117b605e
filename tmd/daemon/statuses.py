"""Decodes the stored host statuses one by one: one of a later version does not affect the
others, as long as its host name can be decoded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import HostStatus
from tmd.daemon.codec import decoded


class Named(Struct, frozen=True):
    """The fields that every version has, and one that earlier versions did not have."""

    host: str
    boot: str = ""


def boot_of(host: str, text: bytes) -> str:
    """The boot of the daemon that wrote the status ``text``; empty if it is not known, or if the
    status is not that of ``host``."""
    try:
        named = msgspec.json.decode(text, type=Named)
    except UNREADABLE:
        return ""
    return named.boot if named.host == host else ""


class KnownStatus(NamedTuple):
    """What was read of one host."""

    text: bytes | None
    """``None``: no daemon of the cluster has sealed it."""
    status: HostStatus | None = None
    later: bool = False
    """Whether this version cannot decode it."""


UNKNOWN = KnownStatus(None)


class Statuses(NamedTuple):
    hosts: tuple[HostStatus, ...]
    """Sorted by host name."""
    unread: tuple[str, ...]
    """Hosts whose status this version cannot decode."""


class StatusReader:
    """Keeps what it has read, for a snapshot that reads only some hosts."""

    def __init__(self, misplaced: Callable[[bytes], None] = lambda _: None) -> None:
        """``misplaced`` is called with each text that is stored under another host's name."""
        self._known: dict[str, KnownStatus] = {}
        self._misplaced = misplaced

    def new(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` of which the latest reading has no status."""
        known = ((name, self._known.get(name, UNKNOWN)) for name in names)
        return [name for name, one in known if one.status is None and not one.later]

    @property
    def unverified(self) -> list[str]:
        """Hosts whose latest reading gave no usable status: it was not sealed with the cluster's
        secret, or stands under the name of another host."""
        return self.new(self._known)

    def read(
        self, values: Iterable[tuple[str, bytes | None]], others: Collection[str] = ()
    ) -> Statuses:
        """Decode the texts stored for hosts. A text that names another host than the one it is
        stored for is skipped. ``others``: hosts that are there, and were read before.

        Raises:
            StoreUnavailable: a text does not even name its host.
        """
        found = {name: self._known[name] for name in others if name in self._known}
        found |= {name: self._of(name, text) for name, text in values}
        self._known = found
        ordered = sorted(found.items())
        return Statuses(
            tuple(known.status for _, known in ordered if known.status is not None),
            tuple(name for name, known in ordered if known.later),
        )

    def _of(self, name: str, text: bytes | None) -> KnownStatus:
        if text is None:
            return KnownStatus(None)
        before = self._known.get(name)
        if before is not None and before.text == text:
            return before
        try:
            status = msgspec.json.decode(text, type=HostStatus)
            known, about = KnownStatus(text, status), status.host
        except UNREADABLE:
            known, about = KnownStatus(text, later=True), decoded(text, Named).host
        if about != name:
            self._misplaced(text)
            return KnownStatus(text)
        return known
