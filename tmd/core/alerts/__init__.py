"""Turns detector findings into alerts: deduplicates, limits, escalates and announces them.

The daemon's watcher and leader call it. It imports only :mod:`tmd.core.values`.
"""
