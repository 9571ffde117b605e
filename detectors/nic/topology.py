"""Finds the GPUs nearest to a device in the PCI tree."""

from __future__ import annotations

import os
from collections.abc import Mapping

NVIDIA, AMD = "0x10de", "0x1002"
DISPLAY_CLASS = "0x03"


def nearest(device: str, gpus: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the GPUs that share the deepest PCI ancestor with ``device``.

    Paths are resolved ones below ``/sys/devices``; ``gpus`` is name -> path. Without a common
    ancestor, not even a root complex, no GPU is near.
    """
    depths = {name: _shared(device, path) for name, path in gpus.items()}
    deepest = max(depths.values(), default=0)
    return tuple(sorted(n for n, depth in depths.items() if depth == deepest)) if deepest else ()


def _shared(one: str, other: str) -> int:
    """How many leading PCI components both paths share."""
    mine, theirs = _pci_parts(one), _pci_parts(other)
    different = (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    return next(different, min(len(mine), len(theirs)))


def _pci_parts(path: str) -> list[str]:
    parts = path.split("/")
    roots = [n for n, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else []


def gpus(sys_root: str) -> dict[str, str]:
    """GPUs of this host: ``pci:<address>`` -> resolved path."""
    found = {}
    folder = f"{sys_root}/bus/pci/devices"
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        try:
            vendor, kind = (_content(f"{folder}/{name}/{file}") for file in ("vendor", "class"))
        except OSError:
            continue
        if vendor in (NVIDIA, AMD) and kind.startswith(DISPLAY_CLASS):
            found[f"pci:{name}"] = os.path.realpath(f"{folder}/{name}")
    return found


def _content(file: str) -> str:
    with open(file) as opened:
        return opened.read().strip()
