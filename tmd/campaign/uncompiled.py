"""Replaces ``torch._dynamo``: campaigns and fault tests compile nothing, and the first optimizer
imports it, which costs every worker more than a second of a core.

Import this before the rest of tmd. Only for the torch version of the constraints file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    return (lambda f: f) if function is None else function


def _stand_in() -> None:
    dynamo, utils = ModuleType("torch._dynamo"), ModuleType("torch._dynamo.utils")
    dynamo.__path__ = []
    vars(utils)["get_optimize_ddp_mode"] = lambda: "no_optimization"
    vars(dynamo).update(
        disable=_disable,
        graph_break=lambda *_, **__: None,
        utils=utils,
        config=SimpleNamespace(optimize_ddp=False),
        trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    )
    sys.modules["torch._dynamo"] = vars(torch)["_dynamo"] = dynamo
    sys.modules["torch._dynamo.utils"] = utils


if "torch._dynamo" not in sys.modules:
    _stand_in()
