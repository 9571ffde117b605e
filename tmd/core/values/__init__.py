"""The frozen values that daemon, trainer and CLI exchange, and the errors they raise.

Everything else in :mod:`tmd.core` builds on this package. It imports only the standard library and
msgspec.
"""
