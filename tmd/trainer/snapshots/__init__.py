"""Keeps copies of unique states in the memory of two hosts.

``writer`` takes a copy and sends it to its keeper, ``store`` holds copies in host memory,
``server`` receives copies and hands them out, and ``snapshots`` schedules all three. It imports
:mod:`tmd.trainer.state_transfer`, :mod:`tmd.trainer.protocol` and :mod:`tmd.trainer.state`.
"""
