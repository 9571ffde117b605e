"""Which GPUs lie nearest to a device in the PCI tree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NVIDIA, AMD = "0x10de", "0x1002"
DISPLAY_CLASS = "0x03"


def nearest(device: str, gpus: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the GPUs with the deepest PCI ancestor in common with ``device``.

    Paths are resolved ones below ``/sys/devices``; ``gpus`` is name -> path. No ancestor in common,
    not even a root complex: none is near.
    """
    depths = {name: _shared(device, path) for name, path in gpus.items()}
    deepest = max(depths.values(), default=0)
    return tuple(sorted(n for n, depth in depths.items() if depth == deepest)) if deepest else ()


def _shared(one: str, other: str) -> int:
    """How many PCI components both paths begin with."""
    mine, theirs = _pci_parts(one), _pci_parts(other)
    different = (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    return next(different, min(len(mine), len(theirs)))


def _pci_parts(path: str) -> list[str]:
    parts = path.split("/")
    roots = [n for n, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else []


def gpus(sys_root: Path) -> dict[str, str]:
    """GPUs of this host: ``pci:<address>`` -> resolved path."""
    found = {}
    folder = sys_root / "bus/pci/devices"
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor in (NVIDIA, AMD) and kind.startswith(DISPLAY_CLASS):
            found[f"pci:{device.name}"] = os.path.realpath(device)
    return found
