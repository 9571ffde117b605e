"""tmd keeps a distributed PyTorch job running while the machines under it fail or are taken.

Scripts import :mod:`tmd.trainer`, plug-ins :mod:`tmd.plugin`. docs/how/code.md names the packages.
"""

__version__ = "0.1.0"
