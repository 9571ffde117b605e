"""As which rank this worker is built, and which other ranks the same objects can be.

Ranks of equal state are built alike. Equal structure is not enough: two stages of a pipeline may
have layers of the same shapes and yet different neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash
from msgspec import Struct, msgpack

from tmd.fabric import GroupView
from tmd.trainer.state.state import Layouts, owned, shapes


class Role(Struct, frozen=True):
    """What the session sees of a rank."""

    structure: str
    """Digest of the names, shapes and types of its tensors and of the sizes of its groups."""
    alike: tuple[int, ...]
    """Ranks of equal state, itself included."""
    buffers: bool = False
    """Whether a forward may write to something that only this rank has."""
    part: str = ""
    """Digest of the parameters that it owns, if an optimizer is divided among ranks."""


class Roles:
    """Those of all ranks, as far as they were heard. ``several``: the script can build any."""

    def __init__(self, *, several: bool) -> None:
        self.several = several
        self.known: tuple[Role, ...] = ()
        """By rank; empty until they were heard."""
        self.built = 0
        """The rank as which this worker is built."""

    def serves(self, rank: int) -> bool:
        """Whether what is built can be ``rank``, as far as is known."""
        own = self._own
        return not self.several or own is None or rank in own.alike

    def resting(self, size: int) -> int:
        """Whose identity to wear while none is asked for: never rank 0 if there is a choice."""
        if not self.several:
            return size - 1
        own = self._own
        return self.built if own is None else own.alike[-1]

    @property
    def commonest(self) -> int:
        """The rank as which to be built while none is asked for: most others are like it."""
        own = self._own
        if not self.several or own is None:
            return self.built
        count = Counter(role.structure for role in self.known)
        structure, most = count.most_common(1)[0]
        if most == count[own.structure]:
            return self.built
        return max(r for r, role in enumerate(self.known) if role.structure == structure)

    def of(self, rank: int | None) -> str:
        """What ``rank`` is built as; empty if that was not heard, or there is none."""
        return "" if rank is None or rank >= len(self.known) else self.known[rank].structure

    @property
    def _own(self) -> Role | None:
        return self.known[self.built] if self.built < len(self.known) else None


def contradiction(roles: Sequence[Role]) -> str:
    """Which ranks cannot be of equal state, as somebody has told; empty if all can."""
    for rank, role in enumerate(roles):
        for other in role.alike:
            if roles[other].part != role.part:
                return (
                    f"register(replicas=...): ranks {rank} and {other} own other parameters of an "
                    "optimizer that is divided among ranks, so their state is not equal"
                )
    return ""


def part_of(layouts: Layouts) -> str:
    """Digest (hex, xxh3-128) of which parameters' state this rank keeps; empty if of all."""
    parts = {name: mine for name, each in layouts.items() if (mine := owned(each)) is not None}
    return xxhash.xxh3_128(msgpack.encode(sorted(parts.items()))).hexdigest() if parts else ""


def structure_of(layouts: Layouts, groups: Sequence[GroupView]) -> str:
    """Digest (hex, xxh3-128) of what a rank has built, whichever place it has in its groups."""
    sizes = [len(view.ranks) for view in groups]
    return xxhash.xxh3_128(msgpack.encode((sorted(shapes(layouts).items()), sizes))).hexdigest()
