"""The host itself: disks, memory, clock, processes that hang.

``reader`` runs as a process of its own and ends, ``probe`` starts it, ``judge`` says what its
answer means, ``detector`` joins them. Empty on purpose: the reader's process imports nothing else.
"""
