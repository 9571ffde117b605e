"""GPU faults that the NVIDIA driver tells of in the kernel log (XIDs)."""

from __future__ import annotations

from .detector import XidConfig, XidDetector

__all__ = ["XidConfig", "XidDetector"]
