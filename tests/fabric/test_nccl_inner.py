"""Settings of NCCL, and how a group of it is freed: on a stand-in for its backend."""

from __future__ import annotations

import threading

import pytest

from tmd.fabric.generations.nccl import NEEDED, USUAL, Freeing, NcclInner, apply_settings, end_all

pytestmark = pytest.mark.timeout(60)

SOON_S = 20.0
SHORT_S = 0.05


class Waits:
    """A backend whose ``shutdown`` waits for what runs, until it is aborted."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.over = threading.Event()
        self.aborted = 0
        self._hangs = hangs

    def shutdown(self) -> None:
        self.over.wait()

    def abort(self) -> None:
        self.aborted += 1
        if not self._hangs:
            self.over.set()


def freeing(*backends: Waits) -> list[Freeing]:
    threads: list[Freeing] = []
    for number, backend in enumerate(backends):
        NcclInner(f"g{number}", backend, threads, None).close()
    return threads


def test_what_ends_by_itself_is_not_aborted() -> None:
    """Its peers may still need it."""
    backend = Waits()
    threads = freeing(backend)
    backend.over.set()
    assert end_all(threads, SOON_S) == ()
    assert backend.aborted == 0


def test_what_does_not_end_is_aborted() -> None:
    backend = Waits()
    assert end_all(freeing(backend), SHORT_S) == ()
    assert backend.aborted == 1


def test_what_hangs_is_named() -> None:
    hangs, ends = Waits(hangs=True), Waits()
    try:
        assert end_all(freeing(hangs, ends), SHORT_S) == ("g0",)
    finally:
        hangs.over.set()


def test_an_aborted_group_is_not_shut_down() -> None:
    """That would wait for its peers."""
    threads: list[Freeing] = []
    inner = NcclInner("g", Waits(hangs=True), threads, None)
    inner.abort()
    inner.close()
    assert end_all(threads, SOON_S) == ()


def test_a_setting_of_torchrun_does_not_let_torch_end_the_process() -> None:
    """torchrun sets it to 1. A choice about NCCL itself is left to its user."""
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "1"}
    apply_settings(environment)
    assert environment == {**USUAL, **NEEDED, "NCCL_NVLS_ENABLE": "1"}
