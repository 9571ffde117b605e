"""Policies that ship with tmd, each a plug-in like those of others.

The leader loads them by entry point and asks them once a turn. They import only :mod:`tmd.plugin`.
"""
