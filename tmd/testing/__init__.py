"""Public fakes: what a plug-in author or a test of the control plane needs, proven by our tests.

The contract of plug-ins as checks: :mod:`tmd.testing.plugins`.
"""

from tmd.testing.context import FakeContext
from tmd.testing.store import MemoryClient, MemoryStore

__all__ = ["FakeContext", "MemoryClient", "MemoryStore"]
