"""Public fakes: what a plug-in author or a test of the control plane needs, proven by our tests."""

from tmd.testing.store import MemoryClient, MemoryStore

__all__ = ["MemoryClient", "MemoryStore"]
