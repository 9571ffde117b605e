"""Detectors that ship with tmd, each a plug-in like those of others.

The daemon's watcher loads them by entry point. They import only :mod:`tmd.plugin`.
"""
