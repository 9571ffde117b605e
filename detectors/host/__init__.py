"""The host itself: disks, memory, clock, hanging processes.

``reader`` runs in a short-lived process, ``probe`` starts it, ``judge`` interprets its result,
``detector`` connects them. This file imports nothing: the reader's process imports the package and
loads the standard library alone.
"""
