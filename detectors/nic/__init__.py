"""Network ports by sysfs: Ethernet, InfiniBand, RoCE and EFA.

``reader`` takes a snapshot, ``judge`` says what it means, ``probe`` keeps the reading in a process
of its own, ``detector`` joins them. Empty on purpose: the probe's process imports the reader only.
"""
