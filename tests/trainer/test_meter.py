"""Processor time, summed over threads: work counts, waiting does not."""

import threading
import time

from tmd.trainer.shadow.meter import Meter


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_work_of_all_threads_is_added_up_and_read_once() -> None:
    """Two threads compute, one only waits for them."""
    meter = Meter()

    def work() -> None:
        with meter.running():
            burn(0.02)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    with meter.running():
        for thread in threads:
            thread.join()
    seconds = meter.read()

    assert 0.04 <= seconds < 0.06
    assert meter.read() == 0.0


def test_failed_work_counts_as_well() -> None:
    meter = Meter()
    try:
        with meter.running():
            burn(0.01)
            raise ValueError
    except ValueError:
        pass

    assert meter.read() >= 0.01
