"""Measures whether a link can carry all outputs of this rank's collectives.

If it cannot, a joiner gets only the gradients: a copy in time, since training never waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from tmd.core.values.limits import ShadowLimits
from tmd.core.values.shadows import excess

LARGE = 8 << 20
"""Bytes of a frame from which its time shows the rate of the link: the kernel's buffers take
smaller ones at once."""


class OutputLoad:
    """What this rank's collectives put out while a joiner is copied, and what its links carry."""

    def __init__(self, limits: ShadowLimits) -> None:
        self._chosen = "" if limits.mirror == "auto" else f'[shadow] mirror = "{limits.mirror}"'
        self._adding = threading.Lock()
        self._bytes = 0
        """Of the present step."""
        self._began: float | None = None
        """When the present step began; ``None`` before the first one."""
        self._outputs = 0.0
        """Most bytes per second of a step."""
        self._overflowed = False

    def begin(self, at: float) -> None:
        """A step begins while a joiner is copied. ``at``: monotonic seconds."""
        with self._adding:
            if self._began is not None and at > self._began:
                self._outputs = max(self._outputs, self._bytes / (at - self._began))
            self._bytes, self._began = 0, at

    def add(self, outputs: Sequence[Tensor]) -> None:
        """A collective of the present step is complete (any thread)."""
        with self._adding:
            self._bytes += sum(tensor.nbytes for tensor in outputs)

    def overflow(self) -> None:
        """The outputs did not fit a link, though they should have (any thread)."""
        self._overflowed = True

    def excess(self, rate: float) -> str:
        """Why a joiner gets only gradients over a link of ``rate`` bytes per second (0: unknown);
        empty if it gets all outputs."""
        if self._chosen:
            return self._chosen
        if self._overflowed:
            return "its outputs have exceeded a link before"
        return excess(self._outputs, rate)


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
