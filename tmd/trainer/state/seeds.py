"""Derives random numbers from (the rank's seed, step), so that no random state ever has to move.

Before each step every common generator is seeded from the seed that the user chose for this rank,
the number of the step and the purpose. A repeated step, a joiner and a restarted job thereby draw
the same numbers, even after the loss of several workers.
"""

from __future__ import annotations

import random
import sys

import torch
import xxhash


def base_seed() -> int:
    """The seed that ``torch.manual_seed`` gave this rank (or torch's default), 63 bits."""
    return int(torch.initial_seed()) & (2**63 - 1)


def mixed(base: int, step: int, purpose: str) -> int:
    """A separate seed for each step and purpose, 64 bits.

    ``purpose`` separates drawing data (``data``) from computing (``step``), since a repeated step
    does not draw its data again.
    """
    return xxhash.xxh3_64_intdigest(f"{base}/{step}/{purpose}".encode())


def seed_all(base: int, step: int, purpose: str) -> None:
    """Seed all generators for one step; see :func:`mixed`."""
    seed_generators(mixed(base, step, purpose))


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy (if loaded) and torch (CPU, CUDA if in use)."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    # Until CUDA is in use torch queues the call, and the queue would grow with every step.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
