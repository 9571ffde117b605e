"""The hosts of a modelled job, and those in reserve."""

from __future__ import annotations

from tmd.simulate.values import Job


class Places:
    """Which host is where."""

    def __init__(self, job: Job, spares: int) -> None:
        self._ranks: list[str | None] = [f"host-{n}" for n in range(job.hosts)]
        self._idle = [f"host-{job.hosts + n}" for n in range(spares)]
        self._up = {host for host in (*self._ranks, *self._idle) if host is not None}

    def at(self, place: int) -> str | None:
        """The host in a place, or ``None`` if there is none now."""
        places = [*self._ranks, *self._idle]
        return places[place] if place < len(places) else None

    def has(self, host: str) -> bool:
        """Whether ``host`` is up."""
        return host in self._up

    def _remove(self, host: str) -> bool:
        """``host`` is gone; returns whether it had a rank."""
        self._up.discard(host)
        if host in self._idle:
            self._idle.remove(host)
        if host not in self._ranks:
            return False
        self._ranks[self._ranks.index(host)] = None
        return True

    def _add(self, host: str) -> None:
        """``host`` is back, without a rank."""
        self._up.add(host)
        self._idle.append(host)

    def _fill(self) -> list[str]:
        """Idle hosts take the ranks that no host has; returns these hosts."""
        joiners = []
        for rank, host in enumerate(self._ranks):
            if host is None and self._idle:
                self._ranks[rank] = self._idle.pop(0)
                joiners.append(self._ranks[rank] or "")
        return joiners
