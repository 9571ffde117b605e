"""Encodes the store's values as sealed JSON and recognises values that no member wrote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from tmd.core.values.decode_errors import LONGEST, UNREADABLE, brief
from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.seal import RecordSeal

log = structlog.get_logger("tmd.store")

FORGED = "redis holds a {} that the secret of this host does not verify"

T = TypeVar("T")
Pairs = list[tuple[str, bytes]]


class Codec:
    """Seals, verifies and decodes the values of one cluster. ``place``: prefix of its keys, for
    messages."""

    def __init__(self, key: bytes, place: str) -> None:
        self._seal = RecordSeal(key)
        self._place = place
        self._forged: set[type] = set()
        self._unreadable: set[type] = set()
        self._known: dict[type, dict[tuple[str, bytes], Any]] = {}
        """Values decoded from the previous snapshot; unchanged ones are not decoded again."""

    def sealed(self, value: Any) -> bytes:
        """``value`` as it is stored."""
        return self._seal.sealed(type(value).__name__, msgspec.json.encode(value))

    def opened(self, value: bytes, kind: type[T]) -> T | None:
        """The value, or ``None`` if no member wrote it.

        Raises:
            StoreUnavailable: a member wrote it, but this version cannot decode it.
        """
        body = self.body(value, kind)
        return None if body is None else decoded(body, kind)

    def readable(self, value: bytes, kind: type[T]) -> T | None:
        """The value, or ``None`` if no member wrote it or this version cannot decode it."""
        try:
            return self.opened(value, kind)
        except StoreUnavailable as error:
            if kind not in self._unreadable:
                self._unreadable.add(kind)
                log.warning("values of another version are left out", reason=str(error))
            return None

    def body(self, value: bytes, kind: type[Any]) -> bytes | None:
        """The text behind the seal, or ``None`` if no member wrote it."""
        body = self._seal.opened(kind.__name__, value)
        if body is None:
            self.note_forged(kind, value)
        return body

    def note_forged(self, kind: type[Any], value: bytes) -> None:
        """Log a value that does not match its key or seal: one of each kind, whatever its key."""
        if kind not in self._forged:
            self._forged.add(kind)  # once: forged values must not flood the log
            begin = value[:LONGEST].decode(errors="replace")
            log.error(FORGED.format(kind.__name__), place=self._place, begins=begin)

    @property
    def forged_kinds(self) -> list[str]:
        """The kinds of value of which one was forged."""
        return sorted(kind.__name__ for kind in self._forged)

    def demanded(self, value: bytes, kind: type[T], key: str) -> T:
        """The decoded value.

        Raises:
            StoreUnavailable: no member wrote it, or this version cannot decode it.
        """
        found = self.opened(value, kind)
        if found is None:
            raise self.forged_error(kind, key)
        return found

    def forged_error(self, kind: type[Any], key: str) -> StoreUnavailable:
        """The error about a forged value at ``key`` that decisions depend on."""
        what = FORGED.format(kind.__name__)
        return StoreUnavailable(
            f"{what}: compare [cluster] secret_file with that of the other hosts. If they are the "
            f"same, a stranger wrote it: delete its key, redis-cli DEL '{self._place}{key}'"
        )

    def named(
        self,
        pairs: Pairs,
        kind: type[Any],
        name_of: Callable[[T], str],
        read: Callable[[bytes], T] | None = None,
        doubtful: Collection[str] = (),
    ) -> dict[str, T]:
        """Values of ``pairs`` by name: those that members wrote and stored under their name.

        A sealed value that was copied to another name counts as forged. ``read`` decodes what is
        not simply a ``kind``. The texts of ``doubtful`` names were made from changes: one that does
        not verify is left out and not logged, and the caller reads the whole text.
        """
        read = read or partial(decoded, kind=kind)
        before = self._known.get(kind, {})
        known = {
            pair: before[pair] if pair in before else self._opened(*pair, kind, name_of, read)
            for pair in pairs
        }
        self._known[kind] = known
        for name, value in pairs:
            if known[name, value] is None and name not in doubtful:
                self.note_forged(kind, value)
        return {name: value for (name, _), value in known.items() if value is not None}

    def _opened(
        self,
        name: str,
        value: bytes,
        kind: type[Any],
        name_of: Callable[[T], str],
        read: Callable[[bytes], T],
    ) -> T | None:
        body = self._seal.opened(kind.__name__, value)
        found = None if body is None else read(body)
        return found if found is not None and name_of(found) == name else None


def paired(reply: Sequence[bytes]) -> Pairs:
    """Pairs of a reply in which names and values alternate."""
    return [(text(name), value) for name, value in zip(reply[::2], reply[1::2], strict=True)]


def text(reply: bytes) -> str:
    """``reply`` as text; invalid bytes stay visible and match no name of tmd's."""
    return reply.decode(errors="backslashreplace")


def decoded(body: bytes, kind: type[T]) -> T:
    """The decoded value of JSON text from the store.

    Raises:
        StoreUnavailable: the text cannot be decoded; another version may have written it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise StoreUnavailable(
            f"redis holds a {kind.__name__} that this version cannot decode: {brief(error)}"
        ) from error
