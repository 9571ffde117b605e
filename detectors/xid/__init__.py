"""Faults that the NVIDIA driver reports: of GPUs (XIDs) and NVSwitches (SXids) in the kernel log,
of GPUs also through NVML's events.

``records`` and ``lines`` read the log, ``listener`` is the process that receives events and
``events`` its owner, ``merge`` combines both sources, ``findings`` applies the ``table``.
``switchlines``, ``switches`` and ``sxids`` do the same for NVSwitches, ``detector`` connects them.
Empty on purpose: the listener's process imports nothing else.
"""
