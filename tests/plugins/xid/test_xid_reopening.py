"""A kernel log that breaks and returns."""

from __future__ import annotations

import errno
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from tmd_detectors.xid.detector import XidConfig, XidDetector
from tmd_detectors.xid.kernellog import REOPEN_S, KernelLogSource, Sequence

from tests.plugins.context import signals_of
from tmd.plugin import State

from .corpus import GPU_LOST, record
from .log import Log


class Plug:
    """A path where a log exists or not, controlled by the test."""

    def __init__(self):
        self.log = Log()
        self.pulled = False

    def open(self, place):
        if self.pulled:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.log.open(place)

    def pull(self):
        self.pulled = True
        self.log.close()

    def plug(self, *texts):
        """Provide another log with all ``texts``, from the first record on."""
        self.log, self.pulled = Log(), False
        for text in texts:
            self.log.write(text)


@pytest.fixture
def plug():
    plug = Plug()
    yield plug
    plug.log.close()


async def test_records_written_while_the_log_was_away_are_read(plug, tmp_path):
    """Once each, although the log starts with its oldest one; the outage is raised and cleared."""
    old, new = GPU_LOST.replace("79", "31"), GPU_LOST
    async with signals_of(XidDetector(plug.open), XidConfig(), tmp_path) as signals:
        plug.log.write(old)
        found = [await anext(signals)]
        plug.pull()
        found.append(await anext(signals))
        plug.plug(old, new)
        found += [await anext(signals) for _ in range(2)]

    reported = [(s.code, s.state) for s in found]
    raised, cleared = State.RAISED, State.CLEARED
    away = ("xid.no_log", raised), ("xid.79", raised), ("xid.no_log", cleared)
    assert reported == [("xid.31", raised), *away]
    assert found[1].message.startswith("the kernel log is not read: /dev/kmsg: ")


def test_a_missing_log_is_retried_at_a_constant_rate(plug):
    """If the pause grew, a fault in the log would be found up to a minute late."""
    plug.pull()
    tries = []

    def open_log(place):
        tries.append(clock)
        return plug.open(place)

    source = KernelLogSource(Path("/dev/kmsg"), open_log)
    for tick in range(1000):
        clock = tick / 4
        assert source.batch(clock) == []
    gaps = {later - earlier for earlier, later in pairwise(tries)}
    plug.plug(GPU_LOST)

    assert gaps == {REOPEN_S}
    assert REOPEN_S <= 1.0
    assert source.problem == "/dev/kmsg: No such file or directory"
    assert len(source.batch(clock + REOPEN_S)) == 1
    assert source.problem == ""
    source.close()


async def test_the_writer_of_a_pipe_may_disconnect_and_return(tmp_path):
    """A disconnect is not taken for a record; records of the next writer are read."""
    place = tmp_path / "kmsg"
    os.mkfifo(place)
    detector, found = XidDetector(), []
    async with signals_of(detector, XidConfig(source=str(place)), tmp_path) as signals:
        found.append(await anext(signals))
        for seq, xid in enumerate(("79", "62")):
            writer = os.open(place, os.O_WRONLY)
            os.write(writer, record(GPU_LOST.replace("79", xid), seq))
            found += [await anext(signals) for _ in range(2)]
            os.close(writer)
            found.append(await anext(signals))

    away = ("xid.no_log", State.RAISED)
    back = ("xid.no_log", State.CLEARED)
    reported = [(s.code, s.state) for s in found]
    written = [("xid.79", State.RAISED), back, away, ("xid.62", State.RAISED), back, away]
    assert reported == [away, *written]


def test_a_reopened_pipe_always_has_a_reader(tmp_path):
    place = tmp_path / "kmsg"
    os.mkfifo(place)
    source = KernelLogSource(place, lambda place: os.open(place, os.O_RDONLY | os.O_NONBLOCK))
    source.batch(0.0)
    stop = threading.Event()

    def open_again():
        clock = 0.0
        while not stop.is_set():
            clock += REOPEN_S
            source.batch(clock)

    opener = threading.Thread(target=open_again)
    opener.start()
    opened = 0
    try:
        for _ in range(2000):
            os.close(os.open(place, os.O_WRONLY | os.O_NONBLOCK))  # ENXIO without a reader
            opened += 1
    finally:
        stop.set()
        opener.join()
        source.close()

    assert opened == 2000


def test_a_smaller_number_at_a_later_time_means_another_log():
    """Otherwise its records would be skipped as already read."""
    sequence = Sequence(900, at=50.0)

    old = [sequence.new(seq, at) for seq, at in ((899, 49.0), (900, 50.0), (899, 50.5))]
    other = [sequence.new(seq, at) for seq, at in ((1, 60.0), (2, 60.0), (2, 60.0), (3, 61.0))]

    assert old == [False] * 3
    assert other == [True, True, False, True]
    assert sequence.lost == 0


def test_a_smaller_number_counts_as_read_if_the_last_record_had_no_time():
    sequence = Sequence(900)

    assert not sequence.new(1, 60.0)


async def test_another_log_after_a_restart_of_the_daemon_is_read(log, tmp_path):
    log.write(GPU_LOST, lost=500)
    async with signals_of(XidDetector(log.open), XidConfig(), tmp_path) as signals:
        found = [await anext(signals)]
    log.ours.send(record(GPU_LOST.replace("79", "62"), 3, at=200.0))
    async with signals_of(XidDetector(log.open), XidConfig(), tmp_path) as signals:
        found += [await anext(signals) for _ in range(2)]

    assert [s.code for s in found] == ["xid.79", "xid.79", "xid.62"]  # restated after the restart


def test_a_log_that_closes_at_each_opening_does_not_count_as_read(plug):
    plug.log.ours.close()
    source = KernelLogSource(Path("log"), plug.open)
    reported = []
    for tick in range(5):
        source.batch(float(tick))
        reported.append(source.problem)

    assert reported == ["log: the kernel log was closed"] * 5
