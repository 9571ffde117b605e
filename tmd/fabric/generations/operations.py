"""The operations of one group that inner groups may still run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from tmd.fabric.device import Queued
from tmd.fabric.generations.generation import Generation
from tmd.torch_private.c10d import error_of


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of ``generation`` that may not have ended."""

    name: str
    generation: Generation
    work: Any
    queued: Queued
    """What the script had queued on its device before."""
    tensors: Sequence[Tensor]
    """All that it reads or writes: kept until it has ended, whatever the script frees."""

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.generation.asked(self.work.is_completed) is True

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: this rank's own device has come to it."""
        return self.queued.done and self.generation.asked(self.work.is_completed) is False

    @property
    def error(self) -> Any:
        """With what it has ended, or ``None``. An operation of NCCL that fails is complete, and
        its ``wait`` raises nothing."""
        return self.generation.asked(partial(error_of, self.work)) if self.ended else None


class Operations:
    """Operations in the order of their calls. Thread-safe."""

    def __init__(self) -> None:
        self._running: deque[Operation] = deque()
        self._changing = threading.Lock()

    def add(self, operation: Operation) -> Any:
        """Keep ``operation`` until it has ended, and let go of the first ones if they have; returns
        the error of one of these, or ``None``."""
        error = None
        with self._changing:
            while self._running and self._running[0].ended:
                error = self._running.popleft().error or error
            self._running.append(operation)
        return error

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Operation]:
        with self._changing:
            return iter(list(self._running))

    def let_go(self, ended: Sequence[Operation]) -> None:
        """Forget operations that have ended."""
        with self._changing:
            self._running = deque(each for each in self._running if each not in ended)

    @property
    def busy(self) -> bool:
        """Whether one may still run. Those of a lost generation do until they are settled."""
        return any(not each.ended for each in self)

    @property
    def waits(self) -> bool:
        return any(each.waits for each in self)
