"""State that survives a restart of the daemon: a dead port must not be taken for an unused one."""

from __future__ import annotations

from ..kept import Kept


class NicMemory(Kept, frozen=True):
    were_up: tuple[str, ...] = ()
    """Identities of the ports that have been up since the host booted."""
