"""The state that moves with a rank: its objects, layout, digests, and data position.

Nothing here opens a link. Every other trainer package uses it; it imports :mod:`tmd.fabric` and
:mod:`tmd.core`.
"""
