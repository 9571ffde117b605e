"""GPU faults that the NVIDIA driver tells of (XIDs): in the kernel log, and by NVML's events.

``records`` and ``lines`` read the log, ``listener`` is the process that hears events and ``events``
its keeper, ``merge`` makes one of two, ``findings`` says what follows by the ``table``,
``detector`` joins them. Empty on purpose: the listener's process imports nothing else.
"""
