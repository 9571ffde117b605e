"""Public fakes for plug-in authors and tests of the control plane, checked by tmd's own tests.

The contract of plug-ins as checks: :mod:`tmd.testing.plugins`; a store in memory and clients of the
daemon's socket: :mod:`tmd.testing.store` and :mod:`tmd.testing.clients`.
"""

from tmd.testing.context import FakeContext
from tmd.testing.store import MemoryClient, MemoryStore

__all__ = ["FakeContext", "MemoryClient", "MemoryStore"]
