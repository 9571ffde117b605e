"""The autograd engine."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this thread runs a part of a backward pass, such as a checkpointed forward pass."""
    return int(torch._C._current_graph_task_id()) != -1
