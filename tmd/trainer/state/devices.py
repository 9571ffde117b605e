"""Names of the GPUs that this worker computes on, as alerts about GPUs have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tmd.core.values.model import GPU


def devices_of(models: Sequence[nn.Module]) -> tuple[str, ...]:
    """The GPUs that hold parameters of ``models``; empty if there is none, or one is unnamed."""
    places = {p.device for model in models for p in model.parameters() if p.device.type == "cuda"}
    names = {named(torch.cuda.get_device_properties(place)) for place in places}
    return () if None in names else tuple(sorted(filter(None, names)))


def named(properties: Any) -> str | None:
    """``pci:0000:3b:00.0``; ``None`` if this torch version does not report the address."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    return f"{GPU}{domain:04x}:{bus:02x}:{device:02x}.0"
