"""The autograd engine."""

from __future__ import annotations

from types import FrameType

import torch


def in_backward() -> bool:
    """Whether this thread runs a part of a backward pass, such as a checkpointed forward pass."""
    return int(torch._C._current_graph_task_id()) != -1


def called_by_engine(frame: FrameType) -> bool:
    """Whether C++ code of a backward pass has called the function of ``frame``, as DDP does when it
    waits for its map of used parameters."""
    caller = frame.f_back
    return caller is None or caller.f_code.co_name == "_engine_run_backward"
