"""Values as the store keeps them: JSON behind a seal, told from what strangers have put there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from tmd.core.errors import StoreUnavailable
from tmd.core.unreadable import LONGEST, UNREADABLE, brief
from tmd.daemon.seal import Seal

log = structlog.get_logger("tmd.store")

FORGED = "redis holds a {} that no member of this cluster wrote, or one with another secret"

T = TypeVar("T")


class Codec:
    """``place`` names the keys of the cluster in what is logged."""

    def __init__(self, key: bytes, place: str) -> None:
        self._seal = Seal(key)
        self._place = place
        self._forged: set[type] = set()
        self._known: dict[type, dict[bytes, Any]] = {}
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
        if body is None and kind not in self._forged:
            self._forged.add(kind)  # said once: a stranger must not fill the logs as well
            text = value[:LONGEST].decode(errors="replace")
            log.error(FORGED.format(kind.__name__), place=self._place, begins=text)
        return body

    def demanded(self, value: bytes, kind: type[T]) -> T:
        """The value.

        Raises:
            StoreUnavailable: no member wrote it, or this version cannot read it.
        """
        found = self.opened(value, kind)
        if found is None:
            raise StoreUnavailable(f"{FORGED.format(kind.__name__)}; delete its key")
        return found

    def all_opened(self, values: Sequence[bytes], kind: type[T]) -> list[T]:
        """Those of ``values`` that members wrote."""
        before = self._known.get(kind, {})
        known = {v: before[v] if v in before else self.opened(v, kind) for v in values}
        self._known[kind] = known
        return [value for value in known.values() if value is not None]

    def all_demanded(self, values: Sequence[bytes], kind: type[T]) -> list[T]:
        """All of ``values``; raises StoreUnavailable as :meth:`demanded` does."""
        found = self.all_opened(values, kind)
        if len(found) < len(set(values)):
            raise StoreUnavailable(f"{FORGED.format(kind.__name__)}; delete its key")
        return found


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
