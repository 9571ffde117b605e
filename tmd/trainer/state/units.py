"""The state of a rank in pieces that can be copied separately, and the remainder.

A *unit* is one parameter with its optimizer state: only ``optimizer.step()`` changes it. The *rest*
(buffers, values of the parameter groups, schedulers and the like) may change at any time in a step
and is copied as a whole, between two steps. A parameter that the script changes although no
optimizer owns it, such as an average, is both: a joiner that follows by gradients gets it with the
rest.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import xxhash
from msgspec import msgpack
from torch import Tensor

from tmd.core.values.errors import StateMismatch
from tmd.fabric import device
from tmd.fabric.packing import unpack
from tmd.trainer.state.digests import Digest, covered, raws
from tmd.trainer.state.divided import set_values
from tmd.trainer.state.dtensors import like, local_part
from tmd.trainer.state.gradients import set_graded
from tmd.trainer.state.layout import Layout, flatten, spec_of, specs, unflatten
from tmd.trainer.state.optimizer_state import all_beside, beside, params_of, spread
from tmd.trainer.state.state import ADDED_GROUP, Registry
from tmd.trainer.state.step_start import StepStart

UNITS, BUFFERS, OTHERS = "parameters and optimizer state", "buffers", "others"
"""Parts of a digest."""
TRAIL, DIGITS = "trail", 8
"""Part of a digest. After each unit the digest so far is cut to ``DIGITS`` hexadecimal digits;
the first difference names the unit."""
DIGEST_BYTES, DIGEST_TENSORS = 1 << 23, 64
"""How much of the units on a device is digested between two waits for it. Training may wait for as
much at the end of a step."""


class Units:
    """A view of the registered objects; unit numbers are the same on every worker of the job."""

    def __init__(self, registry: Registry, start: StepStart | None = None) -> None:
        """``start``: where the present step keeps parameters that it changes before its vote."""
        self._registry = registry
        self.start = start or StepStart()
        self.renew()

    def renew(self) -> None:
        """Use the objects registered now; there may be none for a while."""
        registry = self._registry
        self.optimizers, self._faces = registry.optimizers, registry.faces
        loose = {id(p): p for m in registry.modules for p in m.parameters()}
        # Numbered equally on all ranks, though each owns other parameters of a divided optimizer.
        params = {**loose, **{id(p): p for o in self._faces for p in params_of(o)}}
        self.params: list[Tensor] = list(params.values())
        self.divided = bool(registry.divided)
        """Whether an optimizer is divided among ranks."""

    @property
    def _owner(self) -> dict[int, torch.optim.Optimizer]:
        """Optimizers by the identity of their parameters; any thread."""
        return self._registry.owners.by_param

    def name(self, number: int) -> str:
        """The name of the parameter in its model; else its number."""
        found = {id(p): n for m in self._registry.modules for n, p in m.named_parameters()}
        return found.get(id(self.params[number]), f"parameter {number}")

    @property
    def graded(self) -> tuple[int, ...]:
        """Units that have a gradient."""
        return tuple(i for i, p in enumerate(self.params) if p.grad is not None)

    def grade(self, graded: Collection[int]) -> None:
        """Give exactly these units a gradient, of zeros."""
        chosen = set(graded)
        set_graded((param, number in chosen) for number, param in enumerate(self.params))

    def give_gradients(self, values: Mapping[int, Tensor]) -> None:
        """Give units the gradients ``values``, in host memory: this rank's parts, by number."""
        gradients = dict(values)
        there = [n for n, value in values.items() if value.device != self.params[n].device]
        for number in there:
            place = self.params[number].device
            gradients[number] = torch.empty_like(values[number], device=place)
        unpack([values[n] for n in there], [gradients[n] for n in there])
        for number, gradient in gradients.items():
            self.params[number].grad = like(self.params[number], gradient)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters: no step has more gradients."""
        return sum(local_part(p).nbytes for p in self.params)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one step's gradients. A frozen parameter has none."""
        owned = self._registry.owners.owned
        trained = (p for p in self.params if id(p) in owned and p.requires_grad)
        return sum(local_part(p).nbytes for p in trained)

    @property
    def stale(self) -> str:
        """Why the registered objects are no longer the same parameters; empty if they are."""
        known = {id(p) for p in self.params}
        found = {id(p) for m in self._registry.modules for p in m.parameters()}
        found |= self._registry.owners.owned
        if known == found:
            return ""
        return (
            f"the job has {len(found - known)} parameters that did not exist when its state was "
            f"registered, and lacks {len(known - found)}: call session.register() after all exist"
        )

    def __len__(self) -> int:
        return len(self.params)

    def of(self, optimizer: int) -> list[int]:
        """Numbers of the units that optimizer number ``optimizer`` changes."""
        own = self.optimizers[optimizer]
        owner = self._owner
        return [i for i, p in enumerate(self.params) if owner.get(id(p)) is own]

    def owner(self, number: int) -> torch.optim.Optimizer | None:
        """The optimizer that changes it."""
        return self._owner.get(id(self.params[number]))

    def collect(self, number: int) -> tuple[Layout, list[Tensor]]:
        """Layout and live tensors of a unit."""
        param = self.params[number]
        owner = self._owner.get(id(param))
        kept = {} if owner is None else owner.state.get(param, {})
        return flatten({"param": param, "kept": kept}, f"unit {number}")

    def at_start(self, number: int) -> tuple[Layout, list[Tensor]]:
        """Layout and tensors of a unit with the values of the start of the present step. Threads
        other than the main thread call it within ``start.reading()``."""
        layout, tensors = self.collect(number)
        return layout, [self.start.of(self.params[number]), *tensors[1:]]

    @torch.no_grad()
    def place(self, number: int, layout: Layout, values: Sequence[Tensor]) -> None:
        """Replace a unit, in place where its tensors have the same kind."""
        self.start.place()
        param = self.params[number]
        own, tensors = self.collect(number)
        if specs(own) == specs(layout):
            unpack(values, tensors)
        else:
            owner = self.owner(number)
            tensors = [local_part(param), *(beside(owner, param, v, copy=True) for v in values[1:])]
            tensors[0].copy_(values[0])
        owner = self._owner.get(id(param))
        if owner is None:
            return
        if kept := unflatten(layout, iter(tensors))["kept"]:
            owner.state[param] = spread(param, kept)
        else:
            owner.state.pop(param, None)

    def blank(self, param: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Zeros of ``size`` on the device where the optimizer of ``param`` keeps such a tensor."""
        if size and size == param.shape:
            return torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return beside(
            self._owner.get(id(param)),
            param,
            torch.zeros(size, dtype=dtype, device="cpu"),
            copy=True,
        )

    def keep(self, number: int, kept: dict[str, Any]) -> None:
        """Replace the optimizer's state for a unit."""
        owner = self.owner(number)
        if owner is None:
            return
        param = self.params[number]
        if kept:
            # Tensors are on the right device, but those in lists and the like may not be.
            owner.state[param] = {
                k: v if isinstance(v, Tensor) else all_beside(owner, param, v, copy=True)
                for k, v in kept.items()
            }
        else:
            owner.state.pop(self.params[number], None)

    def rest(self, *, moving: bool = False) -> tuple[Layout, list[Tensor]]:
        """Layout and live tensors of everything that is not a unit.

        ``moving``: with the parameters that the script changes and no optimizer owns, which no tail
        can follow.
        """
        found = {"buffers": dict(self._buffers()), **self._besides()}
        if moving:
            moved = self.start.moved()
            found["moved"] = {n: p for n, p in enumerate(self.params) if id(p) in moved}
        return flatten(found)

    def _besides(self) -> dict[str, Any]:
        """Everything that is neither a unit nor a buffer."""
        return {
            "groups": [self.values(i) for i in range(len(self.optimizers))],
            # Some optimizers keep state that belongs to no parameter.
            "own": [
                {k: v for k, v in o.state.items() if not isinstance(k, Tensor)}
                for o in self.optimizers
            ],
            "others": [o.state_dict() for o in self._registry.others],
        }

    @torch.no_grad()
    def place_rest(self, layout: Layout, values: Sequence[Tensor], *, buffers: bool = True) -> None:
        """Replace everything that is not a unit, with or without ``buffers``. Of these the ones
        that only one side has made since the registration are made here, or removed.

        Raises:
            StateMismatch: buffers or parameter groups differ.
        """
        self.start.place()
        found = unflatten(layout, iter(values))
        if buffers:
            self._place_buffers(found["buffers"])
        for number, value in found.get("moved", {}).items():
            local_part(self.params[number]).copy_(value)
        for number, groups in enumerate(found["groups"]):
            self.set_values(number, groups)
        for optimizer, own in zip(self.optimizers, found["own"], strict=True):
            for key in [k for k in optimizer.state if not isinstance(k, Tensor) and k not in own]:
                del optimizer.state[key]
            optimizer.state.update(own)
        for other, state in zip(self._registry.others, found["others"], strict=True):
            other.load_state_dict(_placed_as(other.state_dict(), state))

    def _place_buffers(self, values: dict[str, Tensor]) -> None:
        here = dict(self._buffers())
        for name in here.keys() & values.keys():
            value, buffer = values[name], here[name]
            if value.shape != buffer.shape:
                sizes = f"{list(value.shape)}, but {list(buffer.shape)} here"
                raise StateMismatch(f"buffer {name} is of size {sizes}")
        for number, late in enumerate(self._registry.late):
            wanted = {}
            for name, value in values.items():
                if name.startswith(prefix := f"{number}."):
                    wanted[name.removeprefix(prefix)] = spec_of(here.get(name, value))
            late.settle(wanted)
        for name, buffer in self._buffers():
            if name in values:  # else it belongs to a part that was made after the registration
                buffer.copy_(values[name])

    def values(self, optimizer: int) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer, without their parameters."""
        groups = self._faces[optimizer].param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def set_values(self, optimizer: int, groups: Sequence[dict[str, Any]]) -> None:
        """The inverse of :meth:`values`.

        Raises:
            StateMismatch: ``groups`` are more or fewer than those here.
        """
        face = self._faces[optimizer]
        if len(groups) != len(face.param_groups):
            raise StateMismatch(
                f"{type(face).__name__} has {len(face.param_groups)} parameter groups here, and "
                f"{len(groups)} there: {ADDED_GROUP}"
            )
        for group, values in zip(face.param_groups, groups, strict=True):
            for name, value in values.items():
                held = group.get(name)
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    held.copy_(value)
                else:
                    group[name] = value
        if self.optimizers[optimizer] is not face:
            set_values(self.optimizers[optimizer].param_groups, face.param_groups)

    def digest_of_rest(self) -> Digest:
        """Digests of the buffers and of the other objects; main thread, between steps."""
        layout, tensors = flatten(self._besides())
        return {
            BUFFERS: _digest(b"", raws(buffer for _, buffer in self._buffers())),
            OTHERS: _digest(msgpack.encode(layout), raws(tensors)),
        }

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for number, module in enumerate(self._registry.modules):
            for name, buffer in module.named_buffers():
                yield f"{number}.{name}", local_part(buffer)


class UnitDigest:
    """The digest of a whole state: of the rest at once, of the units a few at a time.

    The main thread creates it at the start of step ``version``; other threads must give ``rest``.
    """

    def __init__(self, units: Units, version: int, rest: Digest | None = None) -> None:
        self._units = units
        self._rest = units.digest_of_rest() if rest is None else rest
        self.version = version
        self._hash = xxhash.xxh3_128()
        self._trail: list[str] = []
        self._next = 0

    @property
    def complete(self) -> bool:
        return self._next == len(self._units)

    def advance(self) -> None:
        """Add the next unit, which must still be of this version. Of units on a device it adds
        several, so that it waits for the device less often. For threads see
        :meth:`Units.at_start`."""
        encoded: list[bytes] = []
        counts: list[int] = []
        tensors: list[Tensor] = []
        on_device: list[bool] = []
        size = 0
        while not self.complete and size < DIGEST_BYTES and len(tensors) < DIGEST_TENSORS:
            layout, own = self._units.at_start(self._next)
            there = device.current().holds(local_part(self._units.params[self._next]))
            encoded.append(msgpack.encode(layout))
            counts.append(len(own))
            tensors += own
            on_device += [there] * len(own)
            size += sum(t.nbytes for t in own) if there else DIGEST_BYTES
            self._next += 1
        contents = iter(covered(tensors, on_device))
        for head, count in zip(encoded, counts, strict=True):
            self._hash.update(head)
            for content in islice(contents, count):
                self._hash.update(content)
            self._trail.append(self._hash.hexdigest()[-DIGITS:])

    def parts(self) -> Digest:
        """The digest, once complete."""
        assert self.complete
        return {UNITS: self._hash.hexdigest(), TRAIL: "".join(self._trail), **self._rest}


def digest_of_inputs(op: str, inputs: Sequence[Tensor]) -> str:
    """Digest of a rank's input to a collective; empty for operations without a required input.

    A worker computes its inputs itself: the outputs that a joiner receives do not show them.
    """
    if op in ("broadcast", "scatter", "barrier", "recv"):
        return ""
    return _digest(b"", raws(inputs))


def whole_digest(units: Units, version: int, rest: Digest | None = None) -> Digest:
    """The digest of the whole state at once; the state must not change meanwhile. ``rest``: that of
    the rest, if it may have changed."""
    digest = UnitDigest(units, version, rest)
    while not digest.complete:
        digest.advance()
    return digest.parts()


def _digest(start: bytes, contents: Iterable[memoryview]) -> str:
    found = xxhash.xxh3_128(start)
    for content in contents:
        found.update(content)
    return found.hexdigest()


def _placed_as(here: Any, value: Any) -> Any:
    """``value`` with each tensor placed as that in its place in ``here`` is, if there is one.
    It comes from host memory, and an object may keep what it is given."""
    if isinstance(value, Tensor) and isinstance(here, Tensor):
        return like(here, value.to(local_part(here).device))
    if isinstance(value, dict) and isinstance(here, dict):
        placed = copy.copy(value)  # a Counter stays one: the layout of a state tells them apart
        for key, each in value.items():
            placed[key] = _placed_as(here.get(key), each)
        return placed
    is_sequence = isinstance(value, list | tuple) and isinstance(here, list | tuple)
    if is_sequence and len(value) == len(here):
        return type(value)(_placed_as(*pair) for pair in zip(here, value, strict=True))
    return value
