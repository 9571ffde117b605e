"""Which rank this worker's model was built for, and which other ranks it can serve.

Ranks of equal state are built alike. Equal structure does not suffice: two stages of a pipeline may
have layers of the same shapes and yet different neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash
from msgspec import Struct, msgpack

from tmd.fabric import GroupView
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.state import owned, shapes


class Role(Struct, frozen=True):
    """What distinguishes the build of a rank."""

    structure: str
    """Digest of the names, shapes and types of its tensors and of the sizes of its groups."""
    alike: tuple[int, ...]
    """Ranks of equal state, including this rank."""
    buffers: bool = False
    """Whether a forward may write to a buffer, which then has no replica."""
    part: str = ""
    """Digest of the parameters that it owns, if an optimizer is divided among ranks."""
    buckets: str = ""
    """Digest of the buckets of DDP; empty without DDP, or if it keeps its first ones."""


class Roles:
    """Known roles of all ranks. ``several``: the script can build any of them."""

    def __init__(self, *, several: bool) -> None:
        self.several = several
        self.known: tuple[Role, ...] = ()
        """By rank; empty until the job has exchanged them."""
        self.built = 0
        """The rank that this worker is built for."""

    def serves(self, rank: int) -> bool:
        """Whether the built objects can serve ``rank``, as far as its role is known."""
        own = self._own
        return not self.several or own is None or rank in own.alike

    def resting(self, size: int) -> int:
        """The rank that an idle standby impersonates: never rank 0 if there is a choice."""
        if not self.several:
            return size - 1
        own = self._own
        return self.built if own is None else own.alike[-1]

    @property
    def commonest(self) -> int:
        """The rank that an idle standby is built for: its role is the most frequent one."""
        own = self._own
        if not self.several or own is None:
            return self.built
        count = Counter(role.structure for role in self.known)
        structure, most = count.most_common(1)[0]
        if most == count[own.structure]:
            return self.built
        return max(r for r, role in enumerate(self.known) if role.structure == structure)

    def of(self, rank: int | None) -> str:
        """The structure of ``rank``; empty if it is unknown or ``rank`` is ``None``."""
        return "" if rank is None or rank >= len(self.known) else self.known[rank].structure

    @property
    def _own(self) -> Role | None:
        return self.known[self.built] if self.built < len(self.known) else None


def contradiction(roles: Sequence[Role]) -> str:
    """Which ranks are declared equal but cannot be; empty if all can."""
    for rank, role in enumerate(roles):
        for other in role.alike:
            if roles[other].part != role.part:
                return (
                    f"register(replicas=...): ranks {rank} and {other} own different parameters of "
                    "an optimizer that is divided among ranks, so their state is not equal"
                )
            if roles[other].buckets != role.buckets:
                return (
                    f"DDP groups gradients into other buckets on rank {rank} than on rank {other}: "
                    "build DistributedDataParallel with the same arguments on all ranks"
                )
    return ""


def part_of(layouts: Layouts) -> str:
    """Digest (hex, xxh3-128) of the parameters whose state this rank keeps; empty if all."""
    parts = {name: mine for name, each in layouts.items() if (mine := owned(each)) is not None}
    return short_digest(sorted(parts.items()))


def structure_of(layouts: Layouts, groups: Sequence[GroupView]) -> str:
    """Digest (hex, xxh3-128) of the build of a rank, independent of its position in its groups."""
    sizes = [len(view.ranks) for view in groups]
    return short_digest((sorted(shapes(layouts).items()), sizes))


def short_digest(value: str | Sequence[object]) -> str:
    """Digest (hex, xxh3-128) of ``value``; empty if it is empty."""
    return xxhash.xxh3_128(msgpack.encode(value)).hexdigest() if value else ""
