"""The state that moves with a rank: which objects hold it, its layout, its digests, its data place.

Nothing here opens a link. Every other trainer package uses it; it imports :mod:`tmd.fabric` and
:mod:`tmd.core`.
"""
