"""Identifies a boot of this host."""

from __future__ import annotations

from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Changes with every boot; empty if the host does not provide it."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
