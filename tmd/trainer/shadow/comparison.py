"""Digests of a shadow and its source, compared step by step as they arrive."""

from __future__ import annotations

from tmd.trainer.state.digests import Digest
from tmd.trainer.state.units import DIGITS, TRAIL, UNITS


class DigestComparison:
    """Pairs digests by step; either side may come first."""

    def __init__(self) -> None:
        self._ours: dict[int, Digest] = {}
        self._theirs: dict[int, Digest] = {}
        self.verified: int | None = None
        """The newest step at whose start both states were equal; ``None`` if there is none."""
        self.first_unit: int | None = None
        """The first unit that differed in the latest comparison, if one did."""

    def ours(self, step: int, parts: Digest) -> list[str]:
        """Add the shadow's digest; returns the parts that differ, empty if none is known to."""
        self._ours[step] = parts
        return self._differing(step)

    def theirs(self, step: int, parts: Digest) -> list[str]:
        """Add the source's digest; returns the parts that differ, empty if none is known to."""
        self._theirs[step] = parts
        return self._differing(step)

    def awaits(self, step: int) -> bool:
        """Whether the source's digest of ``step`` is still to be compared with the shadow's."""
        return step in self._ours

    def refute(self) -> None:
        """Note that the states differ."""
        self.verified = None

    def _differing(self, step: int) -> list[str]:
        if step not in self._ours or step not in self._theirs:
            return []
        ours, theirs = self._ours.pop(step), self._theirs.pop(step)
        differing = [p for p in theirs if p != TRAIL and ours.get(p) != theirs[p]]
        self.first_unit = _first(ours, theirs) if UNITS in differing else None
        if not differing:
            self.verified = step
            for known in (self._ours, self._theirs):
                for old in [s for s in known if s < step]:
                    del known[old]
        return differing


def _first(ours: Digest, theirs: Digest) -> int | None:
    here, there = ours.get(TRAIL, ""), theirs.get(TRAIL, "")
    if len(here) != len(there):
        return None
    differ = (
        n // DIGITS
        for n in range(0, len(here), DIGITS)
        if here[n : n + DIGITS] != there[n : n + DIGITS]
    )
    return next(differ, None)
