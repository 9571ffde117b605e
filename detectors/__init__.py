"""Detectors that ship with tmd. They import only :mod:`tmd.plugin`."""
