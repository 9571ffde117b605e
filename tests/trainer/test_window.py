"""A background reader of the parameters must never see them change."""

from __future__ import annotations

import threading

import pytest

from tests.fabric.circle import at_once
from tmd.trainer.state.window import Window

pytestmark = pytest.mark.timeout(30)
PATIENCE = 20.0


def test_an_open_window_names_the_step_of_the_parameters() -> None:
    window = Window(tuple)
    assert window.version is None
    for version in (3, 4):
        window.open(version)
        assert window.version == version
        with window.reading() as read:
            assert read == version
    window.close()
    assert window.version is None
    with window.reading() as read:
        assert read is None


def test_close_waits_for_the_piece_in_hand() -> None:
    """The version is removed before the wait, so that no reader begins another piece."""
    window = Window(tuple)
    window.open(1)
    inside, done = threading.Event(), threading.Event()
    order: list[str] = []

    def read() -> None:
        with window.reading() as version:
            assert version == 1
            inside.set()
            # Held until the main thread is inside close().
            assert done.wait(PATIENCE)
            order.append("read")

    def close() -> None:
        assert inside.wait(PATIENCE)
        window.close()
        order.append("closed")

    def watch() -> None:
        assert inside.wait(PATIENCE)
        while window.version is not None:
            pass
        assert order == []
        done.set()

    at_once([read, close, watch])
    assert order == ["read", "closed"]


def test_a_reader_that_comes_again_finds_it_closed() -> None:
    """It may take the lock before the main thread does; only one piece is waited for."""
    window = Window(tuple)
    window.open(1)
    inside = threading.Event()
    stop = threading.Event()
    changing = threading.Event()
    torn: list[int] = []

    def read() -> None:
        while not stop.is_set():
            with window.reading() as version:
                inside.set()
                if version is not None and changing.is_set():
                    torn.append(version)

    def train() -> None:
        assert inside.wait(PATIENCE)
        for step in range(2, 300):
            window.close()
            changing.set()
            changing.clear()
            window.open(step)
        stop.set()

    at_once([read, read, train])
    assert torn == []


def test_an_error_of_a_reader_releases_the_window() -> None:
    window = Window(tuple)
    window.open(1)
    with pytest.raises(ValueError, match="mine"), window.reading():
        raise ValueError("mine")
    window.close()
    window.open(2)
    assert window.version == 2
