"""The scripted driver for the tests of this folder."""

from tests.plugins.nvml.driver import script, shim

__all__ = ["script", "shim"]
