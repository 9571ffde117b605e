"""Bytes of strangers: no crash, no hang, no growth, and an error that says something each time.

``make fuzz`` sends a million; the tests a part of it.
"""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest

from tests.fuzz.mutants import mutants
from tests.fuzz.targets import TARGETS, Target

ROUNDS = int(os.environ.get("TMD_FUZZ_ROUNDS", "45000")) // len(TARGETS)
SEED = int(os.environ.get("TMD_FUZZ_SEED", "1"))
GROWTH = 256 * 1024
"""Bytes that may be kept after all of them: caches of the interpreter."""


def fed(target: Target, data: bytes) -> bool:
    """Whether it was understood; else the error says something."""
    try:
        return target.feed(data) is not None
    except target.errors as error:
        told = str(error)
    assert 10 < len(told) < 1_000, "nothing is said, or a stranger fills the log"
    return False


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_spoilt_bytes_are_refused_with_a_sentence(target: Target) -> None:
    for seed in target.seeds:
        fed(target, seed)
    kept = 0
    spoilt = mutants(target.seeds, ROUNDS, SEED)
    for number, data in enumerate(spoilt):
        if number == ROUNDS // 10:
            gc.collect()
            tracemalloc.start(1)
            kept = tracemalloc.get_traced_memory()[0]
        fed(target, data)
        if number == ROUNDS // 10 + 2_000:
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - kept
            tracemalloc.stop()
            assert grown < GROWTH
    assert number == ROUNDS - 1


@pytest.mark.parametrize("target", [t for t in TARGETS if t.readable], ids=lambda t: t.name)
def test_good_bytes_are_understood(target: Target) -> None:
    """Else the fuzzing would stop at the first door."""
    assert all(fed(target, seed) for seed in target.seeds)
