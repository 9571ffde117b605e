"""Names each piece of the state in a checkpoint, and decides which rank writes it.

The names are those of ``state_dict()`` below the names given to ``session.register``, so that plain
torch finds them: ``model.head.weight``, ``optimizer.state.head.weight.exp_avg``. In a part, tensors
that are private to a rank without being DTensors (a bare module) have the prefix ``rank<r>``. For
the whole see :mod:`tmd.trainer.checkpoints.placing`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tmd.core.values.errors import StateMismatch
from tmd.torch_private.modules import saved_beside_params
from tmd.trainer.state.dtensors import is_spread
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units

Path = tuple[str, ...]
Placing = Callable[[Path, int], Path]
"""Maps a name and the first rank that holds the tensor to its name in the checkpoint."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing add to names."""
OWN = "tmd"
"""Prefix of entries that only this package reads."""
PRIVATE = re.compile(r"rank\d+")
"""Prefix of entries that are private to a rank."""


class Names:
    """Names of the registered objects; in each group of ``alike`` ranks the first one writes.

    Created for each use, since a script with ``session.build`` may have built new objects.
    """

    def __init__(self, registry: Registry, alike: Partition) -> None:
        units = self.units = Units(registry)
        self._registry = registry
        self._first = {rank: group[0] for group in alike for rank in group}
        found: dict[int, list[Path]] = {id(p): [] for p in units.params}
        self.modules = {n: m for n, m in registry.named.items() if isinstance(m, nn.Module)}
        for name, module in self.modules.items():
            for fqn, param in module.named_parameters(remove_duplicate=False):
                found[id(param)].append((name, plain(fqn)))
        for number, each in enumerate(units.params):
            found[id(each)] = found[id(each)] or [("loose", str(number))]
        self._params = [found[id(p)] for p in units.params]
        # An optimizer knows a parameter by one name, but two models may both have a "0.weight".
        count = Counter((id(units.owner(n)), p[0][1]) for n, p in enumerate(self._params))
        self._called = [
            p[0][1] if count[id(units.owner(n)), p[0][1]] == 1 else dotted(p[0])
            for n, p in enumerate(self._params)
        ]
        self._keepers: dict[int, int] = {}
        self._beside_params = {n: _beside_params(n, m) for n, m in self.modules.items()}
        self._optimizers = {
            id(o): name
            for name, o in registry.named.items()
            if isinstance(o, torch.optim.Optimizer)
        }

    def entries(self, number: int, rank: int) -> dict[Path, Tensor]:
        """The part of a unit that ``rank`` writes: live tensors.

        Raises:
            StateMismatch: an optimizer distributes its state differently from the parameter.
        """
        if self._first.get(rank, rank) != rank:
            return {}
        param, keeper = self.units.params[number], self._keeper(number, rank)
        found = {(*prefix(keeper), *name): param for name in self._params[number]}
        state = self.state(number)
        for key, value in self.kept(number).items():
            if not isinstance(value, Tensor):
                continue
            unlike = value.shape != param.shape if is_spread(value) else value.dim() > 0
            if is_spread(param) and unlike:
                raise StateMismatch(f"{dotted(state)}.{key} is distributed unlike its parameter")
            # A step counter is equal in all parts of a parameter.
            if keeper == rank or not is_spread(param) or is_spread(value):
                found[*prefix(keeper), *state, key] = value
        return found

    def names(self, number: int) -> list[str]:
        """Names of a unit's parameter, without a prefix; several if it is tied."""
        return [dotted(name) for name in self._params[number]]

    def claims(self, rank: int) -> list[Path]:
        """Names, without a prefix, of the modules' tensors that ``rank`` is the first to hold a
        part of."""
        mine = [n for n in range(len(self.units)) if self._keeper(n, rank) == rank]
        params = (name for number in mine for name in self._params[number])
        return [*dict.fromkeys((*params, *(self._buffers if self.home(rank) == rank else ())))]

    def awaited(self) -> list[Path]:
        """Names, without a prefix, of buffers that a module declares and makes later."""
        pairs = zip(self.modules, self._registry.late, strict=True)
        return [(name, plain(path)) for name, late in pairs for path in late.awaited()]

    @property
    def others(self) -> list[str]:
        """Names of the registered objects that are neither modules nor optimizers, in the order in
        which their values are saved."""
        known = set(map(id, self._registry.others))
        return [name for name, value in self._registry.named.items() if id(value) in known]

    @property
    def param_groups(self) -> list[str]:
        """For each parameter group, in order, a digest (hex, xxh3-128) of its names."""
        named = {id(p): dotted(self._params[n][0]) for n, p in enumerate(self.units.params)}
        groups = (group["params"] for o in self.units.optimizers for group in o.param_groups)
        names = ("\n".join(sorted(named.get(id(p), "") for p in group)) for group in groups)
        return [xxhash.xxh3_128(each.encode()).hexdigest() for each in names]

    @property
    def digest(self) -> str:
        """Digest (hex, xxh3-128) of all names without a prefix, to compare ranks; without buffers
        that a module makes while it trains, which a fresh process does not have yet."""
        params = (name for names in self._params for name in names)
        made = {id(buffer) for late in self._registry.late for buffer in late.made()}
        buffers = (name for name, held in self._buffers.items() if id(held) not in made)
        text = "\n".join(dotted(name) for name in (*params, *buffers))
        return xxhash.xxh3_128(text.encode()).hexdigest()

    def place(self, number: int, rank: int, placing: Placing) -> Path:
        """The name of a unit's parameter in a checkpoint."""
        return placing(self._params[number][0], self._keeper(number, rank))

    def buffers(self, rank: int, placing: Placing) -> dict[Path, Tensor]:
        """Buffers to fill, by name in the checkpoint."""
        home = self.home(rank)
        return {placing(name, home): held for name, held in self._buffers.items()}

    def home(self, rank: int) -> int:
        """The first rank that shares any tensor with ``rank``. It writes everything but units."""
        return min((self._keeper(n, rank) for n in range(len(self.units))), default=0)

    def kept(self, number: int) -> dict[str, Any]:
        """The optimizer's state for a unit."""
        owner = self.units.owner(number)
        return {} if owner is None else owner.state.get(self.units.params[number], {})

    def besides(self, rank: int) -> dict[Path, Any]:
        """Live values other than units that ``rank`` writes, for use by plain torch."""
        if self.home(rank) != rank:
            return {}
        found: dict[Path, Any] = {}
        for name, value in self._registry.named.items():
            if name in self.modules:
                found.update(self._beside_params[name])
            elif isinstance(value, torch.optim.Optimizer):
                found[name, "param_groups"] = self._groups(value)
            else:
                found.update({(name, str(key)): held for key, held in value.state_dict().items()})
        return {(*prefix(rank), *path): value for path, value in found.items()}

    @property
    def _buffers(self) -> dict[Path, Tensor]:
        every = (each for held in self._beside_params.values() for each in held.items())
        return {path: value for path, value in every if isinstance(value, Tensor)}

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        named = {id(p): name for p, name in zip(self.units.params, self._called, strict=True)}
        return [
            {**group, "params": [named.get(id(p), "") for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def state(self, number: int) -> Path:
        """Start of the names of a unit's optimizer state, after a prefix."""
        owner = self.units.owner(number)
        return (self._optimizers.get(id(owner), ""), "state", self._called[number])

    def _keeper(self, number: int, rank: int) -> int:
        """The first rank that holds a part of the same tensor as ``rank``."""
        param: Any = self.units.params[number]
        if not is_spread(param):
            return self._first.get(rank, rank)
        mesh = param.device_mesh
        if id(mesh) not in self._keepers:
            ranks = mesh.mesh.flatten().tolist()
            self._keepers[id(mesh)] = min(self._first.get(r, r) for r in ranks)
        return self._keepers[id(mesh)]


def _beside_params(name: str, module: nn.Module) -> dict[Path, Any]:
    """Entries of ``state_dict()`` other than parameters, without its hooks: some split a fused
    parameter, and gather it for that from ranks that are elsewhere now."""
    return {(name, plain(fqn)): value for fqn, value in saved_beside_params(module)}


def prefix(keeper: int) -> Path:
    """Prefix, in a part, of names that ``keeper`` is the first rank to hold."""
    return () if keeper == 0 else (f"rank{keeper}",)


def bare(path: Sequence[Any]) -> tuple[Any, ...]:
    """A name in a part without the prefix of its rank."""
    return tuple(path[1:] if PRIVATE.fullmatch(str(path[0])) else path)


def prefix_of(path: Path) -> Path:
    """The prefix that :func:`bare` removes."""
    return path[: len(path) - len(bare(path))]


def dotted(path: Sequence[Any]) -> str:
    """A name as ``torch.distributed.checkpoint`` writes it."""
    return ".".join(map(str, path))


def plain(fqn: str) -> str:
    """A name without the additions of wrappers."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn
