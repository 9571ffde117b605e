"""Lets torchtitan train on the CPU, for a trial, where there is no accelerator.

torchtitan reads the kind of its device when it is imported, so this comes first. On a machine with
an accelerator nothing changes.
"""

from __future__ import annotations

import os
import platform
import sys
from types import SimpleNamespace

import torch


class Processor:
    """What torchtitan asks of the module of a device, such as ``torch.cuda``."""

    set_device = staticmethod(torch.cpu.set_device)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    synchronize = staticmethod(torch.cpu.synchronize)
    get_device_name = staticmethod(lambda *_: platform.processor() or platform.machine())
    memory_stats = staticmethod(lambda *_: {})
    reset_peak_memory_stats = staticmethod(lambda *_: None)
    empty_cache = staticmethod(lambda: None)

    @staticmethod
    def get_device_properties(*_: object) -> SimpleNamespace:
        pages = os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(total_memory=pages * os.sysconf("SC_PAGE_SIZE"))


def use() -> None:
    """Make the CPU the device of torchtitan, if there is no other.

    Raises:
        ImportError: torchtitan was imported before.
    """
    if torch.accelerator.is_available():
        return
    from torchtitan.tools import utils

    if utils.device_module is Processor:
        return
    if "torchtitan.trainer" in sys.modules:
        raise ImportError(
            "there is no accelerator, and torchtitan has been imported: to train on the CPU, "
            "import tmd.integrations.torchtitan before torchtitan"
        )
    utils.device_type, utils.device_module = "cpu", Processor
