"""Measures whether a link can carry all outputs of this rank's collectives.

If it cannot, and the gradients are much smaller, the joiner of a planned move gets only these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from tmd.core.values.limits import ShadowLimits
from tmd.core.values.shadows import excess, spares

LARGE = 64 << 20
"""Smallest frame, in bytes, whose time shows the rate of a link: a large part of a smaller one goes
straight into the kernel's buffers."""


class OutputLoad:
    """Counts the bytes that this rank's collectives put out while its state is copied."""

    def __init__(self, limits: ShadowLimits) -> None:
        self._chosen = "" if limits.mirror == "auto" else f'[shadow] mirror = "{limits.mirror}"'
        self._adding = threading.Lock()
        self._present = 0
        """Bytes of the present step so far."""
        self._began: float | None = None
        """When the present step began; ``None`` if it is not counted."""
        self._steps, self._bytes, self._seconds = 0, 0, 0.0
        """Of all counted steps."""
        self._overflowed: set[str] = set()
        """Plans whose outputs have exceeded a link."""

    def begin(self, at: float) -> None:
        """A step begins, during which the state is copied. ``at``: monotonic seconds."""
        with self._adding:
            self._present, self._began = 0, at

    def end(self, at: float, *, counts: bool) -> None:
        """The present step has ended. It ``counts`` if the state was copied until then."""
        with self._adding:
            if self._began is not None and counts:
                self._steps += 1
                self._bytes += self._present
                self._seconds += at - self._began
            self._began = None

    def add(self, outputs: Sequence[Tensor]) -> None:
        """A collective of the present step is complete (any thread)."""
        with self._adding:
            self._present += sum(tensor.nbytes for tensor in outputs)

    def spares(self, gradients: int) -> bool:
        """Whether ``gradients`` bytes in each step are much less than the outputs."""
        return bool(self._steps) and spares(self._bytes / self._steps, gradients)

    def overflow(self, plan: str) -> None:
        """The outputs did not fit the link to a joiner of ``plan`` (any thread)."""
        self._overflowed.add(plan)

    def excess(self, plan: str, gradients: int, rate: float) -> str:
        """Why a joiner of ``plan`` gets only gradients; empty if it gets all outputs.

        Args:
            gradients: bytes of the gradients of a step.
            rate: bytes per second that the link has carried; 0 if unknown.
        """
        if self._chosen:
            return self._chosen
        if plan in self._overflowed:
            return "its outputs have exceeded the link"
        count = max(self._steps, 1)
        return excess(self._bytes / count, gradients, self._seconds / count, rate)


class LinkRate:
    """The rate of one link, from large frames; one thread."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """The most that was measured, since a slower frame has waited for a processor or for other
        traffic; 0 if nothing was."""

    def sent(self, size: int, seconds: float) -> None:
        """A frame of ``size`` bytes was sent in ``seconds``."""
        if size >= LARGE and seconds > 0:
            self.bytes_per_s = max(self.bytes_per_s, size / seconds)
