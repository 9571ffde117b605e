"""Whose a name in a checkpoint is.

In the parts what ranks hold for themselves begins with ``rank<r>``. In the whole it does unless no
tensor of that rank has a name that another rank's has, too: layers that are numbered through a
pipeline have names of their own, so that plain torch finds them, and a job that divides them
otherwise. It is all of a rank's tensors or none: else names that two ranks use would be found by
the wrong one where only one of them has such a thing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tmd.core.values.errors import StateMismatch
from tmd.trainer.checkpoints.naming import OWN, PRIVATE, Path, Placing, bare, dotted, prefix

Claims = Sequence[Sequence[Path]]
"""By rank: names without a prefix of what it is the first to have."""


class SavedNames:
    """The names of tensors in a checkpoint, as far as they say whose they are."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._below: dict[Path, list[str]] = defaultdict(list)
        for path in filter(is_owned, paths):
            self._below[path[:-1]].append(path[-1])
        begins = {path[0] for path in self._below if path}
        self.owners = frozenset(b for b in begins if PRIVATE.fullmatch(b))
        """What begins the names of ranks that hold something for themselves."""

    def __contains__(self, name: Path) -> bool:
        return name[-1] in self.below(name[:-1])

    def below(self, name: Path) -> Sequence[str]:
        """Last parts of the names that begin so."""
        return self._below.get(name, ())

    def is_private(self, name: Path) -> bool:
        """Whether some rank holds something of that name for itself."""
        return any((owner, *name) in self for owner in self.owners)

    @property
    def besides_optimizers(self) -> set[Path]:
        """Names of all that is not what an optimizer keeps."""
        names = ((*path, last) for path, ends in self._below.items() for last in ends)
        return {name for name in names if len(bare(name)) == 2 and name[0] != OWN}


def without_prefix(paths: Mapping[str, Path]) -> dict[str, Path]:
    """The same names of tensors, those of ranks that share none of them without a prefix."""
    owned = {fqn: path for fqn, path in paths.items() if is_owned(path)}
    count = Counter(dotted(bare(path)) for path in owned.values())
    shares = {path[0] for path in owned.values() if count[dotted(bare(path))] > 1}
    return {fqn: path if path[0] in shares else bare(path) for fqn, path in owned.items()}


def is_owned(path: Path) -> bool:
    """Whether a name can be one rank's alone: all have groups of parameters, by number."""
    return bare(path)[1:2] != ("param_groups",)


def placing(saved: SavedNames, claims: Claims) -> Placing:
    """How names are found in a checkpoint.

    The function raises StateMismatch where nobody can say whose a name is.
    """
    count = Counter(name for claim in claims for name in claim)

    def place(name: Path, keeper: int) -> Path:
        begins = prefix(keeper)
        if saved.owners.issuperset(begins):
            return (*begins, *name)
        if saved.is_private(name) or count[name] > 1:
            raise StateMismatch(
                f"{dotted(name)} is not only one rank's, and the checkpoint is of a job that was "
                "divided otherwise: go on with the same mesh, or number layers through so that "
                "each has a name of its own"
            )
        return name

    return place


def unclaimed(saved: SavedNames, claims: Claims, place: Placing) -> set[Path]:
    """What is in a checkpoint and nobody takes. Raises StateMismatch."""
    taken = {place(name, keeper) for keeper, claim in enumerate(claims) for name in claim}
    return saved.besides_optimizers - taken
