"""Faults that the NVIDIA driver tells of: of GPUs (XIDs) and NVSwitches (SXids) in the kernel log,
of GPUs by NVML's events as well.

``records`` and ``lines`` read the log, ``listener`` is the process that hears events and ``events``
its keeper, ``merge`` makes one of two, ``findings`` says what follows by the ``table``,
``switchlines``, ``switches`` and ``sxids`` do all that for NVSwitches, ``detector`` joins them.
Empty on purpose: the listener's process imports nothing else.
"""
