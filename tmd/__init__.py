"""tmd keeps a distributed PyTorch job running while the machines under it fail or are taken."""

__version__ = "0.1.0"
