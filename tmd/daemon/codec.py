"""Values as the store keeps them: JSON behind a seal, told from what strangers have put there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from tmd.core.values.decode_errors import LONGEST, UNREADABLE, brief
from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.seal import RecordSeal

log = structlog.get_logger("tmd.store")

FORGED = "redis holds a {} that no member of this cluster wrote, or one with another secret"

T = TypeVar("T")
Pairs = list[tuple[str, bytes]]


class Codec:
    """``place`` names the keys of the cluster in what is logged."""

    def __init__(self, key: bytes, place: str) -> None:
        self._seal = RecordSeal(key)
        self._place = place
        self._forged: set[type] = set()
        self._known: dict[type, dict[tuple[str, bytes], Any]] = {}
        """Values read at the last look: what did not change is not read again."""

    def sealed(self, value: Any) -> bytes:
        """``value`` as it goes into the store."""
        return self._seal.sealed(type(value).__name__, msgspec.json.encode(value))

    def opened(self, value: bytes, kind: type[T]) -> T | None:
        """The value, or ``None`` for what a stranger wrote.

        Raises:
            StoreUnavailable: a member wrote it, but this version cannot read it.
        """
        body = self.body(value, kind)
        return None if body is None else decoded(body, kind)

    def body(self, value: bytes, kind: type[Any]) -> bytes | None:
        """The text behind the seal, or ``None`` for what a stranger wrote."""
        body = self._seal.opened(kind.__name__, value)
        if body is None:
            self.note_forged(kind, value)
        return body

    def note_forged(self, kind: type[Any], value: bytes) -> None:
        """Log the first value of ``kind`` that is not what its key or seal claims."""
        if kind not in self._forged:
            self._forged.add(kind)  # once: a stranger must not fill the logs as well
            text = value[:LONGEST].decode(errors="replace")
            log.error(FORGED.format(kind.__name__), place=self._place, begins=text)

    def demanded(self, value: bytes, kind: type[T], key: str) -> T:
        """The value.

        Raises:
            StoreUnavailable: no member wrote it, or this version cannot read it.
        """
        found = self.opened(value, kind)
        if found is None:
            raise self.forged(kind, key)
        return found

    def forged(self, kind: type[Any], key: str) -> StoreUnavailable:
        """The error about a value at ``key`` that decisions depend on and no member wrote."""
        what = FORGED.format(kind.__name__)
        return StoreUnavailable(f"{what}; delete its key: redis-cli DEL '{self._place}{key}'")

    def named(self, pairs: Pairs, kind: type[T], name_of: Callable[[T], str]) -> dict[str, T]:
        """By name, those values of ``pairs`` that members wrote and that stand at their own name.

        A sealed value that was copied to another name is a stranger's work like any other.
        """
        before = self._known.get(kind, {})
        known = {
            pair: before[pair] if pair in before else self._opened(*pair, kind, name_of)
            for pair in pairs
        }
        self._known[kind] = known
        return {name: value for (name, _), value in known.items() if value is not None}

    def _opened(
        self, name: str, value: bytes, kind: type[T], name_of: Callable[[T], str]
    ) -> T | None:
        found = self.opened(value, kind)
        if found is not None and name_of(found) != name:
            self.note_forged(kind, value)
            return None
        return found


def paired(reply: Sequence[bytes]) -> Pairs:
    """Names and values of a reply in which they alternate."""
    return [(text(name), value) for name, value in zip(reply[::2], reply[1::2], strict=True)]


def text(reply: bytes) -> str:
    """``reply`` as text; bytes that are none stay recognisable and fit no name of ours."""
    return reply.decode(errors="backslashreplace")


def decoded(body: bytes, kind: type[T]) -> T:
    """The value that JSON text of the store stands for.

    Raises:
        StoreUnavailable: none; perhaps another version wrote it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise StoreUnavailable(
            f"redis holds a {kind.__name__} that this version cannot read: {brief(error)}"
        ) from error
