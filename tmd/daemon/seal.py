"""Seals that prove that a member of the cluster wrote a value in the store.

Any client of Redis may write there; only holders of the cluster's secret may move a rank. A sealed
value is an HMAC-SHA256 over its kind and its text, in hex, then a space and the text, so that
people can still read it with ``redis-cli``. A seal proves who wrote a value, not when: a replayed
value is recognised by its content (revision, lease epoch, request id), not here.
"""

from __future__ import annotations

import hmac


class RecordSeal:
    """``key``: see :meth:`tmd.config.Settings.store_key`."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sealed(self, kind: str, body: bytes) -> bytes:
        """``body``, a value of that kind, as it is stored."""
        return self._mark(kind, body) + b" " + body

    def opened(self, kind: str, value: bytes) -> bytes | None:
        """The body of a sealed value; ``None`` if no member wrote it as one of that kind."""
        mark, _, body = value.partition(b" ")
        return body if hmac.compare_digest(mark, self._mark(kind, body)) else None

    def _mark(self, kind: str, body: bytes) -> bytes:
        return hmac.digest(self._key, kind.encode() + b"\0" + body, "sha256").hex().encode()
