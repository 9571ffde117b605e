"""Adapters for training frameworks: each module needs its framework, installed as an extra.

Called by training scripts. They use :mod:`tmd.trainer` like any script; nothing imports them.
"""
