"""Copies the whole state of a rank between two workers and verifies that the copy is equal.

Rank migration and recovery call it. It imports :mod:`tmd.trainer.protocol` and
:mod:`tmd.trainer.state`.
"""
