"""The daemon's side of the worker process."""

from __future__ import annotations

from pathlib import Path

from tmd.plugin import bare_python

from ..children import AskedChild
from .report import NvmlReport

WORKER = Path(__file__).with_name("worker.py")
BINDINGS = "pynvml"


def nvml_worker(sysfs: str) -> AskedChild[NvmlReport]:
    """A process whose answers are readings of the GPUs."""
    return AskedChild(
        "the NVML worker", lambda: bare_python(WORKER, sysfs, needs=(BINDINGS,)), NvmlReport
    )
