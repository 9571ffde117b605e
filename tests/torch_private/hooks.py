"""The ways to give a layer a backward hook."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

BACKWARD_HOOKS: list[Callable[[nn.Linear], object]] = [
    lambda layer: layer.weight.register_hook(torch.neg),
    lambda layer: layer.register_full_backward_hook(lambda *_: None),
    lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
]
