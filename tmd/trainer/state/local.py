"""Rank-local state: what a step changes besides the optimizer, and what has no replica.

A forward may write to buffers (BatchNorm's statistics). A poisoned step must leave no trace in them
(invariant I8), and they must survive the loss of their rank: before each vote every rank copies
them to the next two ranks, so that a committed step implies stored copies. Random state is not
here: it is derived (:mod:`tmd.trainer.state.seeds`). Parameters that a step changes are in
:mod:`tmd.trainer.state.moved_parameters`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from msgspec import msgpack
from torch import Tensor, nn

from tmd.core.planning.failover import HOLDER_OFFSETS
from tmd.torch_private.fsdp import forget_gathered, forget_gradients
from tmd.torch_private.modules import keeps_statistics
from tmd.trainer.state.buffers import BufferSlot, bytes_of, differing, equal, slots, version
from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.gradients import set_graded
from tmd.trainer.state.kept_values import KeptValue, restore
from tmd.trainer.state.made_buffers import AbsentBuffers
from tmd.trainer.state.moved_parameters import MovedParameters
from tmd.trainer.state.state import Registry, Stateful
from tmd.trainer.state.step_start import StepStart

log = logging.getLogger("tmd.trainer")

SMALL = 64 << 10
"""Bytes; smaller buffers are copied in every step, larger ones in the first two. From then on a
larger one is copied and compared again in all steps after one that has written to it."""

Shift = Callable[[bytes, int], bytes]
BufferMark = tuple[int, int]
"""Identity and version of a buffer: another one once somebody has written to it or replaced it."""


class LocalState:
    """Watches the buffers of the registered modules, by name and by value.

    Whether ranks exchange copies depends only on the model, never on changes that this worker has
    seen: all workers must take part in the same exchanges. Those changes decide what is copied.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._late: set[str] = set()
        """Buffers that scripts change after the vote."""
        self.exchanged: bool | None = None
        """Whether any rank has buffers; if ``None``, this worker decides by its own."""
        self._held: dict[tuple[int, int], bytes] = {}
        self._moved = MovedParameters(registry)
        self.start = StepStart(lambda: self._moved.moved_loose)
        """What other threads read of parameters that the present step changes."""
        self.torn = False
        """Whether they may have read other values than those of its start."""
        self.renew()

    def renew(self) -> None:
        """Use the objects registered now; there may be none for a while."""
        self._moved.renew()
        self.start.drop()
        modules = self._registry.modules
        self._params = [p for m in modules for p in m.parameters()]
        self._statistics = {
            name
            for name, slot in _slots(modules)
            if slot.held is not None and slot.held.numel() and keeps_statistics(slot.owner)
        }
        self._seen: set[str] = set()
        """Buffers that have changed."""
        self._first = self._found().keys()
        """Those that were there when the modules were registered."""
        self._steps = 0
        self._absent = AbsentBuffers((), ())
        self._saved: dict[str, SavedBuffer] = {}
        self._marks: dict[str, BufferMark] = {}
        """Of large buffers that are not copied: what differs once somebody has written to them."""
        self._written: set[str] = set()
        """Those of them to which somebody has written since: they are copied and compared."""
        self._sent: tuple[dict[str, BufferMark], bytes] | None = None
        """Marks of the buffers when others last got copies of them, and these copies; ``None`` if
        tmd has changed buffers since."""
        self._graded: list[bool] = []
        """Whether each of the parameters had a gradient."""
        self._values: list[tuple[dict[str, Any], dict[str, KeptValue]]] = []
        """Parameter groups, and what they had."""
        self._states: list[tuple[Stateful, dict[str, Any]]] = []

    def begin(self, *, trains: bool = True) -> None:
        """A step begins, in which an optimizer runs if it ``trains``: save what it would change if
        it were poisoned."""
        for wrapper in self._registry.wrappers:
            # A forward without gradients clears it. After the loss of a rank in an evaluation,
            # survivors would expect no broadcast of the buffers, and the joiner would begin one.
            wrapper.require_forward_param_sync = True
        self._keep_parameters(trains=trains)
        self.start.keep(self._moved.copies)
        self.torn = False
        self._keep()
        self._steps += trains

    def keep(self, *, loose: bool = False) -> None:
        """Save what :meth:`undo` restores, and with which :meth:`changed` compares. ``loose``: with
        all parameters that no optimizer owns."""
        self._keep_parameters(trains=False, loose=loose)
        self._keep()

    def _keep_parameters(self, *, trains: bool, loose: bool = False) -> None:
        if self.start.placed:
            self._moved.placed()
            self.start.placed = False
        self._moved.keep(trains=trains, loose=loose)

    def _keep(self) -> None:
        named = list(_slots(self._registry.modules))
        self._absent = AbsentBuffers(self._registry.modules, [slot for _, slot in named])
        found = _found(named)
        self._saved = {
            name: SavedBuffer(buffer, local_part(buffer.buffer).clone())
            for name, buffer in found.items()
            if self._is_watched(name, local_part(buffer.buffer))
        }
        self._marks = {
            name: _mark(buffer.buffer) for name, buffer in found.items() if name not in self._saved
        }
        self._graded = [param.grad is not None for param in self._params]
        self._values = [
            (group, {k: KeptValue.of(v) for k, v in group.items() if k != "params"})
            for optimizer in (*self._registry.optimizers, *self._registry.divided)
            for group in optimizer.param_groups
        ]
        self._states = [(o, copy.deepcopy(o.state_dict())) for o in self._registry.others]

    def changed(self) -> bool:
        """Whether a registered object other than a model has changed since :meth:`keep`."""
        states = any(not _equal(o.state_dict(), before) for o, before in self._states)
        values = ({k: group.get(k) for k in before} for group, before in self._values)
        befores = ({k: kept.copy for k, kept in before.items()} for _, before in self._values)
        return states or not all(map(_equal, values, befores))

    @property
    def has_usable_gradients(self) -> bool:
        """Whether the parameters have gradients, all finite and not all zero."""
        grads = [local_part(p.grad) for p in self._params if p.grad is not None]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        return all(bool(g.isfinite().all()) for g in dense) and any(bool(g.any()) for g in dense)

    def zero_gradients(self) -> None:
        """Set all gradients to zero, as they are on a worker that joins or repeats a step."""
        set_graded((param, param.grad is not None) for param in self._params)

    def release(self) -> None:
        """Release what FSDP2 keeps after a forward pass without a backward pass: a worker that
        joins now would gather it, and the other ranks would not."""
        forget_gathered(self._registry.modules)

    def undo(self) -> None:
        """Remove all traces of a poisoned step before its repeat, even those of code after it.

        A poisoned step leaves the ``with`` block early, but the code after it still runs, and often
        steps a scheduler.
        """
        self._sent = None
        forget_gathered(self._registry.modules)
        forget_gradients(self._registry.modules)
        self.start.drop(self._moved.put_back())
        self._absent.put_back(slot for _, slot in _slots(self._registry.modules))
        for saved in self._saved.values():
            saved.put_back()
        set_graded(zip(self._params, self._graded, strict=True))
        for state, before in self._states:
            state.load_state_dict(before)
        for group, values in self._values:
            restore(group, values)
        self._registry.forget_unscaled()

    def exchange_copies(self, step: int, rank: int, size: int, shift: Shift) -> None:
        """Exchange copies with the neighbours before the vote of ``step``.

        Raises:
            LinkError: a neighbour is gone.
        """
        neighbours = self.neighbours(rank, size)
        if not neighbours:
            return
        found = self._found()
        blob = self._packed({name: local_part(each.buffer) for name, each in found.items()})
        self._sent = {name: _mark(each.buffer) for name, each in found.items()}, blob
        self._held = {k: v for k, v in self._held.items() if k[1] >= step}
        for other, offset in neighbours.items():
            # Copies hold the state after `step`, which is the start of the next one.
            self._held[other, step + 1] = shift(blob, offset)

    def neighbours(self, rank: int, size: int) -> dict[int, int]:
        """The ranks of whose buffers ``rank`` keeps copies, with their distances. Empty if no rank
        has a buffer."""
        if not (self.has_buffers if self.exchanged is None else self.exchanged):
            return {}
        return {(rank - offset) % size: offset for offset in HOLDER_OFFSETS if offset < size}

    def hold(self, rank: int, step: int, buffers: Mapping[str, Tensor]) -> None:
        """Store a copy of the buffers of ``rank`` at the start of ``step``, as far as there are
        buffers of the same name and size here. Large ones that hold the same here are left out:
        they are constants."""
        kept = {}
        for name, here in self._buffers().items():
            there = buffers.get(name)
            if there is not None and there.nbytes == here.nbytes:
                small = here.nbytes <= SMALL or name in self._statistics
                if small or not torch.equal(here.to(there.device), there):
                    kept[name] = there
        self._held[rank, step] = msgpack.encode(bytes_of(kept))

    def changed_since_vote(self) -> list[str]:
        """Buffers that the script has changed since the copies of them were exchanged: a rank that
        is lost now comes back with those. Reports each once."""
        sent, self._sent = self._sent, None
        if sent is None or self.start.placed:  # the state of another rank was put in place since
            return []
        marks, blob = sent
        found = self._found()
        written = {name for name, each in found.items() if marks.get(name) != _mark(each.buffer)}
        if not written - self._late:
            return []
        copies = msgpack.decode(blob, type=dict[str, bytes])
        names = [name for name in copies if name in written - self._late]
        now = bytes_of({name: local_part(found[name].buffer) for name in names})
        late = [name for name in names if now[name] != copies[name]]
        self._late.update(late)
        return [name.partition(".")[2] for name in late]

    def look(self) -> None:
        """Note which buffers the present step has changed."""
        self._live(self._buffers())

    @property
    def moves(self) -> bool:
        """Whether parameters may change in a step before its optimizer runs."""
        return self._moved.known

    def at_vote(self, *, updates: bool = True) -> None:
        """Note what a step has changed. ``updates``: an optimizer runs next."""
        self.torn = self._moved.look(updates=updates, placed=self.start.placed)
        if not updates:
            return
        found = self._found() if self._marks else {}
        for name, mark in self._marks.items():
            if name not in found or _mark(found[name].buffer) != mark:
                self._written.add(name)

    def close(self) -> None:
        """The block of a step in which an optimizer runs has ended; code behind it follows."""
        self._moved.close()

    def release_start(self) -> None:
        """The step is committed, or belongs to a shadow: its parameters may take new values."""
        self.start.drop()

    def set_aside(self, *, loose: bool = False) -> None:
        """A step in which an optimizer should have run ends without one: save what code after its
        block may change. ``loose``: see :meth:`MovedParameters.set_aside`."""
        torn = self._moved.set_aside(loose=loose)
        self.torn = self.torn or torn
        self.start.keep(self._moved.copies)

    def placed(self) -> None:
        """Another state was put in place: what has changed is no work of the script."""
        self._sent = None
        self._moved.placed()
        self.start.drop()

    def carry_over(self, step: int) -> None:
        """Keep copies for the next step: ``step`` was only the end of a ``batches()`` call."""
        for rank, at in [key for key in self._held if key[1] == step]:
            self._held[rank, step + 1] = self._held.pop((rank, at))

    def forget(self) -> None:
        """Drop all copies when ranks return to an earlier step, which makes them invalid."""
        self._held.clear()

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers that a forward may write to."""
        return bool(self._buffers())

    @property
    def is_live(self) -> bool:
        """Whether any of the state has no replica."""
        return bool(self._statistics or self._seen)

    def held(self, rank: int, step: int) -> bytes:
        """The stored copy for ``rank`` at the start of ``step``; empty if there is none."""
        return self._held.get((rank, step), b"")

    def ranks_held(self, step: int) -> tuple[int, ...]:
        """Ranks whose copy at the start of ``step`` is stored here."""
        return tuple(sorted(rank for rank, at in self._held if at == step))

    def own(self) -> bytes:
        """A copy of the current buffers that forwards write to."""
        return self._packed(self._buffers())

    def adopt(self, blob: bytes) -> None:
        """Replace the buffers by a copy of another rank's."""
        self._sent = None
        if not blob:
            return
        buffers = self._buffers()
        for name, raw in msgpack.decode(blob, type=dict[str, bytes]).items():
            buffer = buffers.get(name)
            if buffer is None or buffer.nbytes != len(raw):
                log.warning("no buffer here fits %s of the lost rank: it is not restored", name)
                continue
            flat = torch.frombuffer(bytearray(raw), dtype=buffer.dtype)
            buffer.data.copy_(flat.view(buffer.shape))

    def _buffers(self) -> dict[str, Tensor]:
        """Looked up each time: a script may replace the tensor of a buffer."""
        return {name: local_part(found.buffer) for name, found in self._found().items()}

    def _found(self) -> dict[str, FoundBuffer]:
        return _found(_slots(self._registry.modules))

    def _is_watched(self, name: str, buffer: Tensor) -> bool:
        small = buffer.numel() * buffer.element_size() <= SMALL
        known = name in self._seen or name in self._statistics or name in self._written
        return small or self._steps < 2 or known

    def _packed(self, buffers: dict[str, Tensor]) -> bytes:
        """A copy of the ``buffers`` that forwards write to, and of small ones that forwards have
        created: those of another rank may differ."""
        made = {name for name in buffers.keys() - self._first if buffers[name].nbytes <= SMALL}
        names = sorted({*self._live(buffers), *made})
        return msgpack.encode(bytes_of({name: buffers[name] for name in names}))

    def _live(self, buffers: dict[str, Tensor]) -> list[str]:
        """Buffers that forwards write to."""
        unseen = {name: saved.copy for name, saved in self._saved.items() if name not in self._seen}
        self._seen |= differing(unseen, buffers)
        return sorted((self._seen | self._statistics) & buffers.keys())


class FoundBuffer(NamedTuple):
    """A buffer and the module that has it."""

    owner: nn.Module
    name: str
    buffer: Tensor


class SavedBuffer(NamedTuple):
    """A buffer as it was at the start of a step, and a copy of its values."""

    found: FoundBuffer
    copy: Tensor

    def put_back(self) -> None:
        """Also if the step has removed the buffer, or put another tensor in its place."""
        owner, name, buffer = self.found
        owner._buffers[name] = buffer
        own = local_part(buffer)
        if not torch.equal(own, self.copy):  # an expanded one, for instance, cannot be written
            own.data.copy_(self.copy)


def _mark(buffer: Tensor) -> BufferMark:
    return id(buffer), version(buffer)


def _found(named: Iterable[tuple[str, BufferSlot]]) -> dict[str, FoundBuffer]:
    return {
        name: FoundBuffer(slot.owner, slot.name, slot.held)
        for name, slot in named
        if slot.held is not None and local_part(slot.held).numel()
    }


def _slots(modules: list[nn.Module]) -> Iterator[tuple[str, BufferSlot]]:
    """All buffers, with a name that no other one has."""
    for number, module in enumerate(modules):
        for slot in slots(module):
            yield f"{number}.{slot.path}", slot


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) or bool(one != one and other != other)  # NaN is no change
