"""Copies the state of a rank to host memory for a checkpoint, while a step is computed.

Small values that may change in a step are copied at once; a thread copies the units one by one.
Before the units can change, the main thread copies the remaining ones itself: it waits for memory,
never for a disk.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from msgspec import msgpack
from torch import Tensor

from tmd.fabric import device
from tmd.trainer.checkpoints.naming import OWN, Names, Path
from tmd.trainer.state.data import Position
from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.layout import Layout, flatten


class StagedState:
    """Created by the main thread between two steps."""

    def __init__(self, names: Names, rank: int, step: int, position: Position, seed: int) -> None:
        self.rank, self.step, self.position = rank, step, position
        self.live: dict[Path, Any] = {}
        """By name; a distributed tensor here shows which part this rank holds."""
        self.copies: dict[Path, Any] = {}
        """Copies in host memory, by name; of a distributed tensor, only this rank's part."""
        self._waiting: list[dict[Path, Tensor]] = []
        self._copying = threading.Lock()
        self._queued = device.current().queued(names.units.params)
        self.broken: Exception | None = None
        """Why the copy failed."""
        self.settled = threading.Event()
        """Set once it is known whether the state has changed meanwhile."""
        for path, value in {**names.besides(rank), **private(names, rank, seed)}.items():
            self.live[path] = self.copies[path] = _copied(value)
        for number in range(len(names.units)):
            entries = names.entries(number, rank)
            self.live.update(entries)
            self._waiting.append(entries)

    def advance(self) -> bool:
        """Copy one unit; returns whether more remain."""
        with self._copying, device.after(self._queued):
            if not self._waiting:
                return False
            try:
                self._copy(self._waiting.pop())
            except Exception as error:
                # Stored, not raised: there it would look like an error of training.
                self.broken = error
                self._waiting.clear()
            return True

    def _copy(self, entries: dict[Path, Tensor]) -> None:
        seen: dict[int, Tensor] = {}
        for path, value in entries.items():
            if id(value) not in seen:
                seen[id(value)] = local_part(value).to("cpu", copy=True)
            self.copies[path] = seen[id(value)]

    def confirm(self) -> None:
        """Wait until it is known whether the state has changed while it was copied.

        Raises:
            StateMismatch: it may have.
        """
        self.settled.wait()
        if self.broken is not None:
            raise self.broken

    def release(self) -> None:
        """Free the copies, which are on disk now, and the live tensors: they may belong to objects
        that this worker is about to drop."""
        self.live.clear()
        self.copies.clear()

    def finish(self) -> None:
        """Any thread: returns once all is copied, or has failed."""
        while self.advance():
            pass


def private(names: Names, rank: int, seed: int) -> dict[Path, Tensor]:
    """Entries that only the same rank of a job of the same size needs to resume bit for bit."""
    kept = {
        name: {
            "at": names.state(number),
            "keys": list(values := names.kept(number)),
            "values": {k: v for k, v in values.items() if not isinstance(v, Tensor)},
        }
        for number in range(len(names.units))
        for name in names.names(number)
    }
    graded = list(names.units.graded)
    others = {"kept": kept, "modules": [*names.modules], "seed": seed, "names": names.digest}
    others["graded"], others["others"], others["groups"] = graded, names.others, names.param_groups
    more = flatten(others)
    found: dict[Path, Tensor] = {}
    for name, (layout, tensors) in (("rest", names.units.rest()), ("more", more)):
        for number, tensor in enumerate((_as_tensor(layout), *tensors)):
            found[*private_path(rank, name), str(number)] = tensor
    return found


def private_path(rank: int, name: str) -> Path:
    """Name of a private entry: a layout, then its tensors, by number."""
    return (OWN, f"rank{rank}", name)


def layout_of(tensor: Tensor) -> Layout:
    """The layout that ``tensor`` encodes."""
    layout: Layout = msgpack.decode(tensor.numpy().tobytes(), type=Layout)
    return layout


def _as_tensor(layout: Layout) -> Tensor:
    return torch.frombuffer(bytearray(msgpack.encode(layout)), dtype=torch.uint8)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_part(value).to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_copied(held) for held in value]
    return copy.deepcopy(value)
