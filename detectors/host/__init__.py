"""The host itself: disks, memory, clock, hanging processes.

``reader`` runs in a short-lived process, ``probe`` starts it, ``judge`` interprets its result,
``detector`` connects them. Empty on purpose: the reader's process imports nothing else.
"""
