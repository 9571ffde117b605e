"""Objects without a sender.

torch sends an object as a tensor of its size and a tensor of its pickle; both are uninitialised
before. Without an answering rank (in the sandbox, in a spoilt step) that would be a pickle of any
size and content, so it becomes ``None``. A group sees only tensors: the call stack shows that they
are parts of an object.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import FrameType

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from tmd.extras import is_installed, is_python
from tmd.fabric.memory import writing

NONE = b"N."
"""The shortest pickle of ``None``."""
CALLERS = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
    }
)


log = logging.getLogger("tmd.trainer")


def under_way() -> bool:
    """Whether one of torch's functions for objects is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name in CALLERS and module == distributed_c10d.__name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def warn_of_none() -> None:
    """Warn once for each line of a script that asks for an object where no rank answers."""
    callers = [f for f in _frames() if _package(f) not in ("torch", "tmd", "runpy")]
    callers = callers or [sys._getframe(1)]
    files = ((f, f.f_code.co_filename) for f in callers)
    own = (f for f, file in files if not (is_installed(file) or is_python(file)))
    found = next(own, callers[0])  # a script may be a module of an installed package
    _warn(f"{found.f_code.co_filename}:{found.f_lineno}")


def _frames() -> Iterator[FrameType]:
    """The call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@cache
def _warn(place: str) -> None:
    log.warning(
        "%s asks another rank for an object, which is None here, since this worker holds no rank "
        "yet: before its first step a script must compute it on each rank (docs/start/porting.md)",
        place,
    )


def empty(tensors: Sequence[Tensor]) -> None:
    """Set ``tensors``, sizes or pickles, to those of ``None``."""
    with writing():
        for tensor in tensors:
            if tensor.dtype == torch.int64:
                tensor.data.fill_(len(NONE))
            elif tensor.dtype == torch.uint8:
                pattern = torch.frombuffer(bytearray(NONE), dtype=torch.uint8)
                copies = -(-tensor.numel() // len(NONE))
                tensor.data.copy_(pattern.repeat(copies)[: tensor.numel()].view(tensor.shape))
