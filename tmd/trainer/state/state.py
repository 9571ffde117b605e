"""The state that moves with a rank: whether it fits another worker, and its replacement.

Module tensors and optimizer tensors are written in place, so a joiner that already ran an iteration
takes over without allocation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd.torch_private.ddp import ddp_of, fix_buckets
from tmd.torch_private.optimizers import forget_unscaled, is_zero
from tmd.trainer.state.divided import local, set_values
from tmd.trainer.state.late_buffers import LateBuffers
from tmd.trainer.state.layout import (
    Layout,
    Layouts,
    Node,
    TensorSpec,
    dtype_of,
    flatten,
    named,
    specs,
    unflatten,
)
from tmd.trainer.state.optimizer_state import params_of
from tmd.trainer.state.owners import Owners
from tmd.trainer.state.pending import Pending
from tmd.trainer.state.unwrapping import (
    expanded,
    refuse_hidden_in_module,
    refuse_hidden_in_optimizer,
    scalers_of,
    unwrapped,
)

LOOSE = "loose parameters"
"""Name for parameters of no registered object; no keyword can equal it."""
OPTIMIZER, OWNED = ("state", "param_groups"), "owned"
"""Keys in the state of an optimizer, and the key of a divided one's own parameters."""
ADDED_GROUP = (
    "a standby runs only the code between two batches() calls, so add parameter groups there, and "
    "not in a loop"
)
"""What to do about parameter groups that only one of two workers has."""


@runtime_checkable
class Stateful(Protocol):
    """Any object with this pair of methods: optimizers, schedulers, scalers, loaders."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Loose(nn.Module):
    """Parameters of an optimizer that no registered module has."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        # Not by assignment, which accepts only an ``nn.Parameter``.
        self._parameters.update({str(n): cast(nn.Parameter, p) for n, p in enumerate(params)})


class Registry:
    """The objects whose state moves, by the names given to ``session.register``.

    Raises:
        TypeError: an object has neither parameters nor ``state_dict``/``load_state_dict``.
        ValueError: other parameters require gradients than when DDP was built.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects: dict[str, nn.Module | Stateful] = {}
        self.divided: list[Any] = []
        """Optimizers that are divided among ranks; the list object never changes."""
        self.wrappers: list[DistributedDataParallel] = []
        """DDP around the registered modules."""
        self.buckets = ""
        """The buckets of each, in the words of :func:`fix_buckets`."""
        self.late: list[LateBuffers] = []
        """Buffers of each of :attr:`modules`; the list object never changes."""
        self.owners = Owners()
        self._wholes: dict[str, Any] = {}
        self.renew(objects)

    def renew(self, objects: Mapping[str, object]) -> None:
        """Replace the registered objects. Raises TypeError or ValueError."""
        self._objects.clear()
        self._wholes.clear()
        self.wrappers.clear()
        for name, value in expanded(objects):
            if isinstance(value, nn.Module):
                refuse_hidden_in_module(name, value)
                if (wrapper := ddp_of(value)) is not None:
                    self.wrappers.append(wrapper)
                self._objects[name] = unwrapped(value)
            elif is_zero(value):
                self._objects[name], self._wholes[name] = local(value), value
            elif isinstance(value, Stateful):
                if isinstance(value, torch.optim.Optimizer):
                    refuse_hidden_in_optimizer(name, value)
                self._objects[name] = value
            else:
                raise TypeError(
                    f"register({name}=...): {type(value).__name__} has no state_dict and "
                    "load_state_dict, so its state cannot move"
                )
        self.divided[:] = self._wholes.values()
        self.owners.renew(self.optimizers, self.divided)
        self.buckets = "|".join(map(fix_buckets, self.wrappers))
        _refuse_shared(self.faces)
        if loose := self._loose():
            self._objects[LOOSE] = Loose(loose)
        self.late[:] = [
            LateBuffers(name, o) for name, o in self._objects.items() if isinstance(o, nn.Module)
        ]

    def _loose(self) -> list[Tensor]:
        """Parameters of optimizers that belong to no module here."""
        held = {id(p) for module in self.modules for p in module.parameters()}
        return [p for o in self.faces for p in params_of(o) if id(p) not in held]

    def refuse_hidden(self) -> None:
        """Raises TypeError: a module has an extra state, which was not there at first."""
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                refuse_hidden_in_module(name, value)

    @property
    def named(self) -> dict[str, nn.Module | Stateful]:
        """All registered objects by name."""
        return {**self._objects, **self._wholes}

    @property
    def modules(self) -> list[nn.Module]:
        return [o for o in self._objects.values() if isinstance(o, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers; of a divided one this rank's part."""
        return [o for o in self._objects.values() if isinstance(o, torch.optim.Optimizer)]

    @property
    def faces(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the script holds: the values of their parameter groups apply."""
        return [
            self._wholes.get(name, o)
            for name, o in self._objects.items()
            if isinstance(o, torch.optim.Optimizer)
        ]

    @property
    def others(self) -> list[Stateful]:
        """Schedulers, scalers and other small objects."""
        return [
            o
            for o in self._objects.values()
            if not isinstance(o, nn.Module | torch.optim.Optimizer)
        ]

    @property
    def scalers(self) -> list[torch.amp.GradScaler]:
        """Also those inside registered objects, whose state has theirs."""
        found = {id(s): s for other in self.others for s in scalers_of(other)}
        return list(found.values())

    def forget_unscaled(self) -> None:
        """Let a repeated step unscale its gradients again, which the scaler would refuse."""
        for scaler in self.scalers:
            forget_unscaled(scaler)

    def collect(self) -> tuple[Layouts, list[Tensor]]:
        """Layouts of all objects and the tensors that they name, in one fixed order."""
        layouts: Layouts = {}
        tensors: list[Tensor] = []
        for name in self._objects:
            layouts[name], found = flatten(self._state_of(name), name)
            tensors.extend(found)
        return layouts, tensors

    def _state_of(self, name: str) -> Any:
        value = self._objects[name]
        if name not in self._wholes:
            return _state_of(value)
        assert isinstance(value, torch.optim.Optimizer)
        # As the optimizer's next step would.
        set_values(value.param_groups, self._wholes[name].param_groups)
        names = {
            id(p): f"{path}.{fqn}"
            for path, held in self._objects.items()
            if isinstance(held, nn.Module)
            for fqn, p in held.named_parameters()
        }
        owned = [names.get(id(p), "?") for p in params_of(value)]
        return {**_state_of(value), OWNED: owned}

    def other_groups(self, layouts: Layouts) -> str:
        """How the parameter groups of optimizers differ from those in ``layouts``; empty if they do
        not. Both may have more than at their registration."""
        for name, value in self._objects.items():
            # Each rank has another part of a divided one.
            if not isinstance(value, torch.optim.Optimizer) or name in self._wholes:
                continue
            # Not its own groups: what it shows of them may be the script's choice.
            here, there = _groups(flatten(_state_of(value))[0]), _groups(layouts.get(name))
            if here is not None and there is not None and here != there:
                return (
                    f"{name}: parameter groups of {here} parameters here, of {there} there: "
                    f"{ADDED_GROUP}"
                )
        if late := self._loose():
            return (
                f"an optimizer has a parameter of shape {list(late[0].shape)} since it was "
                "registered, which is in no registered module, so that its values cannot move: "
                "call session.register() after all parameters exist"
            )
        return ""

    def difference(self, ours: Layouts, theirs: Layouts) -> str:
        """As :func:`mismatch`, for ``ours`` as they were at the registration; buffers that only one
        side has made since then are no difference."""
        if not mismatch(ours, theirs):
            return ""
        awaited = {f"{name}.{key}" for name, late in self._late_by_name() for key in late.awaited()}
        return mismatch(ours, theirs, self.collect()[0], awaited)

    def _late_by_name(self) -> Iterable[tuple[str, LateBuffers]]:
        names = [name for name, o in self._objects.items() if isinstance(o, nn.Module)]
        return zip(names, self.late, strict=True)

    def place(self, layouts: Layouts) -> tuple[list[Tensor], list[Pending]]:
        """Tensors that receive a state of ``layouts``, and objects to load afterwards.

        If the structure here is equal, these are the live tensors and only plain values remain to
        be set. Otherwise fresh tensors are allocated and loaded with ``load_state_dict``. An object
        that is neither module nor optimizer is always loaded if it has tensors: those that it
        returns may be copies.
        """
        for name, late in self._late_by_name():
            if name in layouts:
                late.settle(late.among(layouts[name]))
        targets: list[Tensor] = []
        pending: list[Pending] = []
        for name, layout in layouts.items():
            value = self._objects[name]
            own, tensors = flatten(self._state_of(name), name)
            same = specs(own) == specs(layout) and _same_shape(own, layout)
            if not same:
                tensors = [
                    torch.empty(s.shape, dtype=dtype_of(s), device="cpu") for s in specs(layout)
                ]
            in_place = isinstance(value, nn.Module | torch.optim.Optimizer) or not tensors
            if own != layout or not in_place:
                face = self._wholes.get(name)
                pending.append(Pending(name, value, layout, tensors, face, fresh=not same))
            targets.extend(tensors)
        return targets, pending


def _refuse_shared(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises TypeError: two optimizers change one parameter. A rank moves with one state for it."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for param in params_of(optimizer):
            other = owners.setdefault(id(param), optimizer)
            if other is not optimizer:
                raise TypeError(
                    f"register(optimizer=...): a parameter of shape {list(param.shape)} belongs to "
                    "two optimizers, of which only one could keep its state when a rank moves: "
                    "give the shared parameters to one of them"
                )


def mismatch(
    ours: Layouts, theirs: Layouts, now: Layouts | None = None, awaited: Collection[str] = ()
) -> str:
    """Why a state with layouts ``theirs`` cannot replace one with ``ours``; empty if it can.

    Modules must agree by name; one side may still lack optimizer state. A tensor may also be as in
    ``now``, the layouts of a later moment, and one that is ``awaited`` need not be here.
    """
    if missing := sorted(ours.keys() ^ theirs.keys()):
        return f"registered objects differ: {', '.join(missing)}"
    for name in ours:
        if _is_optimizer(ours[name]):
            continue
        first, there = _named(ours[name], name), _named(theirs[name], name)
        here = first if now is None else _named(now[name], name)
        different = [
            path
            for path in sorted(here.keys() | there.keys())
            if there.get(path) not in (here.get(path), first.get(path))
            and not (path in awaited and path in there)
        ]
        if different:
            return _difference(different, here, there)
    return ""


def owned(layout: Layout) -> tuple[str, ...] | None:
    """The parameters of this part of a divided optimizer; ``None`` for any other object."""
    if not isinstance(layout, Node) or layout.keys != (*OPTIMIZER, OWNED):
        return None
    return tuple(unflatten(layout.items[2], iter(())))


def shapes(layouts: Layouts) -> dict[str, TensorSpec]:
    """All tensors by name, except those of optimizers, which may not exist yet."""
    return {
        path: spec
        for name, layout in layouts.items()
        if not _is_optimizer(layout)
        for path, spec in _named(layout, name).items()
    }


def _difference(
    names: Iterable[str], here: dict[str, TensorSpec], there: dict[str, TensorSpec]
) -> str:
    lines = [f"{n}: {_shown(here.get(n))} here, {_shown(there.get(n))} there" for n in names]
    more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more


def _shown(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{list(spec.shape)} {spec.dtype.removeprefix('torch.')}"


def _named(layout: Layout, path: str) -> dict[str, TensorSpec]:
    return dict(named(layout, path))


def _is_optimizer(layout: Layout) -> bool:
    return isinstance(layout, Node) and (layout.keys or ())[:2] == OPTIMIZER


def _groups(layout: Layout | None) -> list[int] | None:
    """How many parameters each group of an optimizer has; ``None`` if it is no optimizer's."""
    groups = _list(layout, "param_groups")
    members = [_list(group, "params") for group in groups.items] if groups is not None else [None]
    sizes = [len(each.items) for each in members if each is not None]
    return sizes if len(sizes) == len(members) else None


def _list(layout: Layout | None, key: str) -> Node | None:
    """The list at ``key``, if there is one."""
    if not isinstance(layout, Node) or layout.keys is None or key not in layout.keys:
        return None
    found = layout.items[layout.keys.index(key)]
    return found if isinstance(found, Node) and found.keys is None else None


def _same_shape(own: Layout, other: Layout) -> bool:
    if isinstance(own, Node) and isinstance(other, Node):
        return (
            own.keys == other.keys
            and len(own.items) == len(other.items)
            and all(map(_same_shape, own.items, other.items))
        )
    return type(own) is type(other)


def _state_of(value: nn.Module | Stateful) -> Any:
    if isinstance(value, nn.Module):
        # Buffers that state_dict() leaves out still affect the next forward.
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, torch.optim.Optimizer):
        return _in_order(value.state_dict())
    return value.state_dict()


def _in_order(state: dict[str, Any]) -> dict[str, Any]:
    """Sorted by parameter: an optimizer keeps the order in which it met them, which differs in a
    worker that received its state in pieces."""
    numbered = [k for k in state["state"] if isinstance(k, int)]
    others = [k for k in state["state"] if not isinstance(k, int)]
    return {**state, "state": {k: state["state"][k] for k in (*sorted(numbered), *others)}}
