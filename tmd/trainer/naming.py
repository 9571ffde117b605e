"""Under which name each piece of the state is in a checkpoint, and which rank writes it.

The names are those of ``state_dict()`` below the names given to ``session.register``, so that plain
torch finds them: ``model.head.weight``, ``optimizer.state.head.weight.exp_avg``. What ranks hold
for themselves without saying so by a DTensor (a bare module) begins with ``rank<r>`` in a part. In
the whole it does only if another rank has something of the same name: layers of a pipeline that are
numbered through have their own names, and may be divided otherwise by who goes on from there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tmd.core.errors import StateMismatch
from tmd.trainer.replicas import Partition, group_of
from tmd.trainer.state import Registry
from tmd.trainer.units import Units

Path = tuple[str, ...]
Placing = Callable[[Path, int], Path]
"""The name in a checkpoint of what a rank, the first of those that have it, calls so."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""
OWN = "tmd"
"""Begins what only this package reads."""
PRIVATE = re.compile(r"rank\d+")
"""Begins what a rank holds for itself."""


class Saved:
    """Which names there are in a checkpoint."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._below: dict[Path, list[str]] = defaultdict(list)
        for path in paths:
            self._below[path[:-1]].append(path[-1])
        self._owners = sorted({p[0] for p in self._below if p and PRIVATE.fullmatch(p[0])})

    def __contains__(self, name: Path) -> bool:
        return name[-1] in self.below(name[:-1])

    def below(self, name: Path) -> Sequence[str]:
        """Last parts of the names that begin so."""
        return self._below.get(name, ())

    def is_private(self, name: Path) -> bool:
        """Whether some rank holds something of that name for itself."""
        return any((owner, *name) in self for owner in self._owners)


class Names:
    """Of what is registered now; ``alike`` are the ranks of equal state, of which the first writes.

    Made anew for each use: a script with ``session.build`` may have built others since.
    """

    def __init__(self, registry: Registry, alike: Partition) -> None:
        units = self.units = Units(registry)
        self._registry, self._alike = registry, alike
        found: dict[int, list[Path]] = {id(p): [] for p in units.params}
        for name, value in registry.named.items():
            if isinstance(value, nn.Module):
                for fqn, param in value.named_parameters(remove_duplicate=False):
                    found[id(param)].append((name, plain(fqn)))
        for number, each in enumerate(units.params):
            found[id(each)] = found[id(each)] or [("loose", str(number))]
        self._params = [found[id(p)] for p in units.params]
        # An optimizer knows parameters by one name, and two models may both have a "0.weight".
        several = sum(isinstance(value, nn.Module) for value in registry.named.values()) > 1
        self._called = [dotted(n[0] if several else n[0][1:]) for n in self._params]
        self._optimizers = {
            id(o): name
            for name, o in registry.named.items()
            if isinstance(o, torch.optim.Optimizer)
        }

    def entries(self, number: int, rank: int) -> dict[Path, Tensor]:
        """What ``rank`` writes of a unit: the live tensors.

        Raises:
            StateMismatch: an optimizer spreads its state in another way than the parameter.
        """
        if group_of(self._alike, rank)[0] != rank:
            return {}
        param, keeper = self.units.params[number], self._keeper(number, rank)
        found = {(*_own(keeper), *name): param for name in self._params[number]}
        state = self._state(number)
        for key, value in self.kept(number).items():
            if not isinstance(value, Tensor):
                continue
            if _is_spread(value) and value.shape != param.shape:
                raise StateMismatch(f"{dotted(state)}.{key} is spread unlike its parameter")
            # A step counter is the same for all parts of a parameter.
            if keeper == rank or not _is_spread(param) or _is_spread(value):
                found[*_own(keeper), *state, key] = value
        return found

    def claims(self, rank: int) -> list[str]:
        """Names, without a prefix, of tensors of which ``rank`` is the first to have a part."""
        mine = [n for n in range(len(self.units)) if self._keeper(n, rank) == rank]
        buffers = self._buffers if self.home(rank) == rank else ()
        params = (name for number in mine for name in self._params[number])
        return [dotted(name) for name in (*params, *buffers)]

    @property
    def digest(self) -> str:
        """Of all names without a prefix (hex, xxh3-128): whether ranks have the same ones."""
        params = (name for names in self._params for name in names)
        said = "\n".join(dotted(name) for name in (*params, *self._buffers))
        return xxhash.xxh3_128(said.encode()).hexdigest()

    def targets(
        self, number: int, rank: int, place: Placing, saved: Saved, new: Callable[..., Any]
    ) -> tuple[dict[Path, Tensor], dict[str, Tensor]]:
        """Where to read a unit into: by name in the checkpoint, and what its optimizer is to keep.

        ``new``: a tensor for what is called so, given the parameter.
        """
        name, param = self._params[number][0], self.units.params[number]
        found = place(name, self._keeper(number, rank))
        state: Path = (*found[: len(found) - len(name)], *self._state(number))
        kept = {key: new((*state, key), param) for key in saved.below(state)}
        return {found: param, **{(*state, key): value for key, value in kept.items()}}, kept

    def buffers(self, rank: int, place: Placing) -> dict[Path, Tensor]:
        """Where to read buffers into, by name in the checkpoint."""
        home = self.home(rank)
        return {place(name, home): held for name, held in self._buffers.items()}

    def home(self, rank: int) -> int:
        """The first of all ranks that have a part of anything that ``rank`` has a part of. It
        writes what is no unit."""
        return min((self._keeper(n, rank) for n in range(len(self.units))), default=0)

    def kept(self, number: int) -> dict[str, Any]:
        """What the optimizer keeps for a unit."""
        owner = self.units.owner(number)
        return {} if owner is None else owner.state.get(self.units.params[number], {})

    def besides(self, rank: int) -> dict[Path, Any]:
        """What ``rank`` writes of all that plain torch may want besides units: live."""
        if self.home(rank) != rank:
            return {}
        found: dict[Path, Any] = {}
        for name, value in self._registry.named.items():
            if isinstance(value, nn.Module):
                found.update(_beside_params(name, value))
            elif isinstance(value, torch.optim.Optimizer):
                found[name, "param_groups"] = self._groups(value)
            else:
                found.update({(name, str(key)): held for key, held in value.state_dict().items()})
        return {(*_own(rank), *path): value for path, value in found.items()}

    @property
    def _buffers(self) -> dict[Path, Tensor]:
        return {
            path: held
            for name, value in self._registry.named.items()
            if isinstance(value, nn.Module)
            for path, held in _beside_params(name, value).items()
            if isinstance(held, Tensor)
        }

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        named = {id(p): name for p, name in zip(self.units.params, self._called, strict=True)}
        return [
            {**group, "params": [named.get(id(p), "") for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def _state(self, number: int) -> Path:
        owner = self.units.owner(number)
        return (self._optimizers.get(id(owner), ""), "state", self._called[number])

    def _keeper(self, number: int, rank: int) -> int:
        """The first of all ranks that hold a part of what ``rank`` holds a part of."""
        param: Any = self.units.params[number]
        ranks = param.device_mesh.mesh.flatten().tolist() if _is_spread(param) else [rank]
        return min(group_of(self._alike, r)[0] for r in ranks)


def _beside_params(name: str, module: nn.Module) -> dict[Path, Any]:
    """What ``state_dict()`` has besides parameters."""
    params = {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)}
    held = module.state_dict().items()
    return {(name, plain(fqn)): value for fqn, value in held if fqn not in params}


def placing(saved: Saved, claims: Sequence[str]) -> Placing:
    """How names are found in a checkpoint; ``claims``: those of all ranks, by rank, as lines.

    The function raises StateMismatch where nobody can say whose a name is.
    """
    count = Counter(line for claim in claims for line in claim.splitlines())

    def place(name: Path, keeper: int) -> Path:
        own = (*_own(keeper), *name)
        if keeper == 0 or own in saved:
            return own
        if saved.is_private(name) or count[dotted(name)] > 1:
            raise StateMismatch(
                f"{dotted(name)} is not only one rank's, and the checkpoint is of a job that was "
                "divided otherwise: go on with the same mesh, or number layers through so that "
                "each has a name of its own"
            )
        return name

    return place


def bare(path: Sequence[Any]) -> tuple[Any, ...]:
    """A name in a part, without what says whose it is."""
    return tuple(path[1:] if PRIVATE.fullmatch(str(path[0])) else path)


def dotted(path: Sequence[Any]) -> str:
    """A name as ``torch.distributed.checkpoint`` writes it."""
    return ".".join(map(str, path))


def plain(fqn: str) -> str:
    """A name without what wrappers have put into it."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def _own(keeper: int) -> Path:
    return () if keeper == 0 else (f"rank{keeper}",)
