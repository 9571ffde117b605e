"""Keeps torch.compile out of tmd's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def untraced(method: Callable[..., object]) -> Any:
    """Mark a method that compiled code may call but that must not be traced.

    Typed ``Any``: torch declares overloads of which its own callers use one.
    """
    return torch.compiler.disable(method)  # type: ignore[no-untyped-call]
