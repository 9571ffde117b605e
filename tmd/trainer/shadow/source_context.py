"""What the sources of a worker share, their pace, and the stages of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct

from tmd.core.values.limits import ShadowLimits
from tmd.trainer.protocol import frames
from tmd.trainer.shadow.meter import Meter
from tmd.trainer.shadow.output_load import OutputLoad
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window


class SourceStage(Enum):
    """The joiner's progress as known to the source. Only the main thread changes it, except to
    OVER."""

    OPENED = auto()  # the joiner moves to its data position
    COPYING = auto()  # units and tails
    LIVE = auto()  # outputs, and tails as long as it may have to jump
    TAILS = auto()  # tails only, and the boundary of each step
    RELEASED = auto()  # only what is queued; the joiner has taken another rank
    OVER = auto()


class SourcePace(Struct, frozen=True):
    """When a source looks, and by which clock."""

    idle_s: float = 0.02
    """Interval at which an idle sender looks for work."""
    stalled_s: float = 5.0
    """A joiner that takes no bytes for this time during a whole copy is dropped."""
    check_every: int = frames.CHECK_EVERY
    """Steps between two digests."""
    clock: Callable[[], float] = time.monotonic


class SourceContext(NamedTuple):
    """What all sources of a worker use."""

    units: Units
    window: Window
    limits: ShadowLimits
    meter: Meter
    """Counts the processor time of their threads."""
    load: OutputLoad
    """Whether this rank's outputs can be mirrored."""
