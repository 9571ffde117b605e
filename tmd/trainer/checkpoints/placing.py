"""Decides which rank owns a name in a checkpoint.

In the parts every name that is private to a rank begins with ``rank<r>``. In the whole the prefix
stays only on the names of a rank that shares a name with another rank. A pipeline whose layers are
numbered through has unique names, which plain torch and a job with another division then find. The
rule holds for all tensors of a rank together: otherwise a name that two ranks use would resolve to
the wrong one where only one of them holds that tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tmd.core.values.errors import StateMismatch
from tmd.trainer.checkpoints.naming import OWN, PRIVATE, Path, Placing, bare, dotted, prefix

Claims = Sequence[Sequence[Path]]
"""By rank: names without a prefix that it is the first rank to hold."""


class SavedNames:
    """Names of the tensors in a checkpoint, and their owners."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._below: dict[Path, list[str]] = defaultdict(list)
        for path in filter(is_owned, paths):
            self._below[path[:-1]].append(path[-1])
        begins = {path[0] for path in self._below if path}
        self.owners = frozenset(b for b in begins if PRIVATE.fullmatch(b))
        """Prefixes of the ranks with private entries."""

    def __contains__(self, name: Path) -> bool:
        return name[-1] in self.below(name[:-1])

    def below(self, name: Path) -> Sequence[str]:
        """Last parts of the names that begin with ``name``."""
        return self._below.get(name, ())

    def is_private(self, name: Path) -> bool:
        """Whether ``name`` is private to some rank."""
        return any((owner, *name) in self for owner in self.owners)

    @property
    def besides_optimizers(self) -> set[Path]:
        """All names except optimizer state."""
        names = ((*path, last) for path, ends in self._below.items() for last in ends)
        return {name for name in names if len(bare(name)) == 2 and name[0] != OWN}


def without_prefix(paths: Mapping[str, Path]) -> dict[str, Path]:
    """The same names; those of ranks that share no name lose their prefix."""
    owned = {fqn: path for fqn, path in paths.items() if is_owned(path)}
    count = Counter(dotted(bare(path)) for path in owned.values())
    shares = {path[0] for path in owned.values() if count[dotted(bare(path))] > 1}
    return {fqn: path if path[0] in shares else bare(path) for fqn, path in owned.items()}


def is_owned(path: Path) -> bool:
    """Whether one rank can own a name: all ranks have parameter groups, by number."""
    return bare(path)[1:2] != ("param_groups",)


def placing(saved: SavedNames, claims: Claims) -> Placing:
    """Returns a function that finds names in a checkpoint.

    It raises StateMismatch where the owner of a name is ambiguous.
    """
    count = Counter(name for claim in claims for name in claim)

    def place(name: Path, keeper: int) -> Path:
        begins = prefix(keeper)
        if saved.owners.issuperset(begins):
            return (*begins, *name)
        if saved.is_private(name) or count[name] > 1:
            raise StateMismatch(
                f"several ranks use the name {dotted(name)}, and the checkpoint is of a job that "
                "was divided differently: resume with the same mesh, or number layers through so "
                "that each has a unique name"
            )
        return name

    return place


def unclaimed(saved: SavedNames, claims: Claims, place: Placing) -> set[Path]:
    """Names in a checkpoint that no rank claims. Raises StateMismatch."""
    taken = {place(name, keeper) for keeper, claim in enumerate(claims) for name in claim}
    return saved.besides_optimizers - taken
