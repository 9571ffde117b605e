"""Network ports in sysfs: Ethernet, InfiniBand, RoCE and EFA.

``reader`` takes a snapshot, ``judge`` interprets it, ``probe`` runs the reader in a process of its
own, ``detector`` connects them. Empty on purpose: the probe's process imports the reader only.
"""
