"""Restores parameters that a script changes in other ways than by an optimizer.

Some change before the vote of a step: a momentum encoder in a forward pass, or the perturbed point
of SAM between two backward passes. Others change after it: an averaged model, whose parameters no
optimizer owns, or weights that the script normalizes. A broken step must leave no trace in them
either. Copies of all parameters would double the memory of a model, so only those are copied that
have been seen to move. A parameter counts as moved once its version, its memory or, in the first
steps, one of some elements differs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.buffers import version
from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.early_state import EarlyState
from tmd.trainer.state.state import Registry

SAMPLED_STEPS = 3
"""Elements are compared until so many steps have ended: writing to ``param.data`` changes no
version."""
ELEMENTS = 8
FIRST_BYTES, FIRST_SHARE = 1 << 30, 3
"""Host memory for copies in the first step, in which nothing has been seen yet: so many bytes, plus
so many times the bytes of the parameters that an optimizer owns."""
AVERAGES_SHARE = 2
"""Largest ratio of the bytes without an optimizer to those with one at which the former may be an
average: one in single precision has twice the bytes of a model in half precision."""

log = logging.getLogger("tmd.trainer")


class ParameterMark(NamedTuple):
    """What differs once a parameter has been written to."""

    version: int
    memory: int
    elements: bytes
    """Some of them; empty if they were not looked at."""

    def differs(self, other: ParameterMark) -> bool:
        looked = bool(self.elements and other.elements)
        return self[:2] != other[:2] or (looked and self.elements != other.elements)


class WatchedParameter(NamedTuple):
    """A parameter of a registered module."""

    name: str
    param: nn.Parameter
    loose: bool
    """Whether no optimizer owns it."""
    average: str
    """Name of the largest part of the module that contains it and no parameter of an optimizer;
    empty if there is none."""

    @property
    def size(self) -> int:
        """Bytes of this rank's part."""
        return local_part(self.param).nbytes


class MovedParameters:
    """Watches the parameters of the registered modules from step to step. Main thread."""

    def __init__(self, registry: Registry, first_bytes: int = FIRST_BYTES) -> None:
        """``first_bytes``: see :data:`FIRST_BYTES`."""
        self._registry, self._first_bytes = registry, first_bytes
        self.renew()

    def renew(self) -> None:
        """Use the objects registered now."""
        self._owners = self._registry.owners.by_param
        """The optimizers of the parameters, as :attr:`_all` shows them."""
        self._all = list(_watched(self._registry))
        self._early = EarlyState(self._registry)
        self._before_vote: set[int] = set()
        """Numbers of parameters that have moved between the beginning of a step and its vote."""
        self._after_vote: set[int] = set()
        """Numbers of those that code behind the block of a step has moved: loose ones in any step,
        others in the first steps."""
        self._steps = 0
        """Number of steps that came to the vote of an update and did not end without it."""
        self._kept: list[ParameterMark] = []
        self._voted: list[ParameterMark] | None = None
        self._closed: list[ParameterMark] | None = None
        """At the end of the block, in the first steps."""
        self._copies: dict[int, Tensor] = {}
        self._lost = ""
        """Name of a parameter that has moved in a broken step and has no copy."""

    @property
    def known(self) -> bool:
        """Whether some may change in the next step before its vote: some have, or no step has come
        to its vote yet."""
        return bool(self._before_vote) or self._steps == 0

    @property
    def moved_loose(self) -> frozenset[int]:
        """Identities of those that no optimizer owns and that have moved."""
        numbers = self._before_vote | self._after_vote
        if self._voted is not None:
            numbers = numbers | _moved(self._voted, self._marks())
        return frozenset(id(self._all[number].param) for number in self._loose_of(numbers))

    @property
    def copies(self) -> dict[int, Tensor]:
        """This rank's parts of those that may change in the present step, with their values before
        they do, by the identity of the parameter."""
        return {id(self._all[number].param): copy for number, copy in self._copies.items()}

    def keep(self, *, trains: bool, loose: bool = False) -> None:
        """A step begins: copy what may move in it.

        ``trains``: an optimizer runs in it. An evaluation may exchange all weights for a while,
        from which nothing follows. ``loose``: copy all that no optimizer owns.
        """
        marks = self._marks()
        if trains:
            self._early.begin()
        if self._voted is not None:
            self._after_vote |= self._loose_of(_moved(self._voted, marks))
        if self._closed is not None:
            self._after_vote |= self._with_neighbours(_moved(self._closed, marks))
        self._look_at_owners()
        self._kept, self._voted, self._closed, self._lost = marks, None, None, ""
        self._copies = self._to_host() if trains and self._steps == 0 else {}
        if loose:
            self._copies |= self._to_host(owned=False)
        for number in self._before_vote - self._copies.keys():
            self._copies[number] = local_part(self._all[number].param).clone()

    def _look_at_owners(self) -> None:
        """A script may have given an optimizer other parameters, as when it unfreezes a layer."""
        if self._owners is self._registry.owners.by_param:
            return
        before, found = self._all, list(_watched(self._registry))
        self._owners = self._registry.owners.by_param
        if [id(watched.param) for watched in found] != [id(watched.param) for watched in before]:
            return  # parameters that were made after the registration, which no part of tmd knows
        self._all = found
        owned = {n for n, watched in enumerate(found) if before[n].loose and not watched.loose}
        self._after_vote -= owned

    def look(self, *, updates: bool = True, placed: bool = False) -> bool:
        """A step has come to its vote. ``updates``: an optimizer runs next. ``placed``: another
        state was put in place meanwhile. Returns whether a parameter without a copy has changed in
        the step."""
        marks = self._marks()
        moved = _moved(self._kept, marks)
        if placed:
            self._early.forget()
        if updates:
            self._early.check()
            self._voted = marks
            self._steps += 1
        self._learn(moved)
        return not moved <= self._copies.keys()

    def _learn(self, moved: set[int]) -> None:
        new = self._with_neighbours(moved) - self._before_vote
        if new:
            self._before_vote |= new
            size = sum(self._all[number].size for number in new) / 1e6
            log.warning(
                "the script changes %s in a step before its optimizer runs: from now on each step "
                "copies what may change like this (%d parameters, %.1f MB), so that it can be "
                "repeated after a loss",
                self._all[min(moved & new or new)].name,
                len(new),
                size,
            )

    def close(self) -> None:
        """The block of a step in which an optimizer runs has ended; code behind it follows."""
        self._closed = self._marks() if self._steps <= SAMPLED_STEPS else None

    def set_aside(self, *, loose: bool = False) -> bool:
        """The step ends without an update: copy what the code after its block may change. Returns
        whether a parameter without a copy has changed in the step.

        ``loose``: it is one of several passes. Code behind its block must leave no trace even if it
        begins to move an average only now, since elsewhere it runs once in a step.
        """
        moved = _moved(self._kept, self._marks()) - self._copies.keys()
        if moved:
            self._lost = self._all[min(moved)].name
        for number in self._after_vote - self._copies.keys() - moved:
            self._copies[number] = _host_copy(local_part(self._all[number].param))
        if loose:
            self._copies |= self._averages(moved | self._copies.keys())
        # The step does not count: nothing is known of the code behind an update.
        self._steps -= self._voted is not None
        self._voted = None
        return bool(moved)

    def placed(self) -> None:
        """Another state was put in place since the last vote."""
        self._voted = self._closed = None
        self._early.forget()

    def put_back(self) -> list[Tensor]:
        """Restore the values from the beginning of the step. Returns what was written to.

        Raises:
            StateMismatch: a parameter without a copy has changed.
        """
        if self._lost:
            name, self._lost = self._lost, ""
            raise StateMismatch(
                f"the step cannot be repeated: {name} changed in it before its optimizer ran, as "
                "in no step before, so that there is no copy of its values; this worker ends, "
                "since it could only go on with other numbers"
            )
        restored = []
        for number, saved in self._copies.items():
            own = local_part(self._all[number].param)
            before = saved.to(own.device)
            if not torch.equal(own, before):
                own.data.copy_(before)
                restored.append(own)
        return restored

    def _marks(self) -> list[ParameterMark]:
        sampled = self._steps <= SAMPLED_STEPS
        return [_mark(watched.param, sampled=sampled) for watched in self._all]

    def _loose_of(self, numbers: set[int]) -> set[int]:
        return {n for n in self._with_neighbours(numbers) if self._all[n].loose}

    def _with_neighbours(self, moved: set[int]) -> set[int]:
        """With all parameters of the averages of which one has moved: an average moves as a whole,
        and a step of it may be too small for the elements that are compared."""
        moving = {self._all[number].average for number in moved} - {""}
        if not moving:
            return moved
        return moved | {n for n, watched in enumerate(self._all) if watched.average in moving}

    def _averages(self, known: Set[int]) -> dict[int, Tensor]:
        """Copies of the parameters that no optimizer owns, except ``known``. An empty dictionary if
        they are much larger than those that one owns: then they are frozen, as below adapters."""
        found = [n for n, watched in enumerate(self._all) if watched.loose and n not in known]
        owned = sum(watched.size for watched in self._all if not watched.loose)
        if sum(self._all[n].size for n in found) > AVERAGES_SHARE * owned:
            return {}
        return {n: _host_copy(local_part(self._all[n].param)) for n in found}

    def _to_host(self, *, owned: bool = True) -> dict[int, Tensor]:
        """Copies of all, or of those that no optimizer owns, as far as there is memory. Those that
        an optimizer owns come first."""
        size = sum(watched.size for watched in self._all if not watched.loose)
        left = self._first_bytes + FIRST_SHARE * size
        copies = {}
        order = sorted(enumerate(self._all), key=lambda one: (one[1].loose, one[1].size))
        for number, watched in order:
            if watched.size <= left and (owned or watched.loose):
                left -= watched.size
                copies[number] = _host_copy(local_part(watched.param))
        return copies


def _watched(registry: Registry) -> Iterator[WatchedParameter]:
    owned = registry.owners.owned
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, value in registry.named.items():
        if isinstance(value, nn.Module):
            for path, param in value.named_parameters():
                found.setdefault(id(param), (f"{name}.{path}", param))
    trained = {part for each, (name, _) in found.items() if each in owned for part in _parts(name)}
    for each, (name, param) in found.items():
        average = next((part for part in _parts(name) if part not in trained), "")
        yield WatchedParameter(name, param, each not in owned, average)


def _parts(name: str) -> list[str]:
    """Names of the modules that contain the parameter ``name``, the largest first."""
    dots = [place for place, letter in enumerate(name) if letter == "."]
    return [name[:place] for place in dots]


def _moved(before: list[ParameterMark], now: list[ParameterMark]) -> set[int]:
    if before == now:  # as in nearly every step
        return set()
    pairs = enumerate(zip(before, now, strict=True))
    return {number for number, (old, new) in pairs if old.differs(new)}


def _mark(param: nn.Parameter, *, sampled: bool) -> ParameterMark:
    # In nearly every step of a job: few calls of torch.
    memory = 0 if hasattr(param, "to_local") else param.data_ptr()
    if not sampled or not (own := local_part(param)).data_ptr():
        return ParameterMark(version(param), memory, b"")
    some = own.flatten()[:: max(1, own.numel() // ELEMENTS)][:ELEMENTS]
    return ParameterMark(
        version(param), memory, some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    )


def _host_copy(own: Tensor) -> Tensor:
    return own.clone() if own.device.type == "cpu" else own.cpu()
