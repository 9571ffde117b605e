"""The detector on a log: a socket that keeps records apart, and the real one."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import tracemalloc
from contextlib import aclosing, contextmanager

import pytest
from tmd_detectors.xid.detector import Follower, XidConfig, XidDetector, load
from tmd_detectors.xid.kernellog import BATCH, KernelLog, Sequence

from tests.plugins.context import signals_of
from tmd.plugin import Severity, State, boot_id

from .corpus import open_pipe, record
from .log import refused

GONE = "NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', GPU has fallen off the bus."
GPU = "pci:0000:03:00.0"


@pytest.fixture
def watch(log, tmp_path):
    """The signals of a detector that reads ``log``; its folder is kept."""

    def run(config=None):
        return signals_of(XidDetector(log.open), config or XidConfig(), tmp_path)

    return run


async def test_a_line_becomes_a_signal(log, watch):
    async with watch() as signals:
        log.write("usb 1-1: new device")
        log.write(GONE)
        signal = await anext(signals)

    assert (signal.code, signal.entity, signal.severity) == ("xid.79", GPU, Severity.FATAL)
    assert GONE in signal.evidence
    assert any("2025-10" in e for e in signal.evidence)
    assert "reboot" in signal.message


async def test_lines_of_user_space_are_ignored_unless_configured(log, watch):
    log.write(GONE, facility=1)
    log.write(GONE.replace("79", "62"))
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.62"

    log.write(GONE, facility=1)
    async with watch(XidConfig(facilities=(0, 1))) as signals:
        assert (await anext(signals)).code == "xid.62"  # restated
        assert (await anext(signals)).code == "xid.79"


async def test_a_restart_neither_repeats_nor_loses_a_report(log, watch):
    """A restart clears an alert that moves no rank. Lines read before it are not read again,
    although a new reader starts with the oldest; lines written in the meantime are."""
    lines = [GONE.replace("79", str(n)) for n in (13, 31, 8)]
    log.write(lines[0])
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.13"
    log.ours.send(record(lines[0], 1))
    log.write(lines[1])
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.31"
    log.ours.send(record(lines[0], 1))
    log.ours.send(record(lines[1], 2))
    log.write(lines[2])
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.8"


async def test_a_lost_gpu_is_still_lost_after_a_restart(log, watch):
    log.write(GONE)
    async with watch() as signals:
        first = await anext(signals)
    async with watch() as signals:
        again = await anext(signals)

    assert (again.code, again.entity, again.severity) == ("xid.79", GPU, Severity.FATAL)
    assert again.message == first.message


async def test_a_fault_is_not_lost_if_the_daemon_stops_while_its_symptom_is_cleared(log, watch):
    """Its line is not read again."""
    log.write(GONE.replace("79", "45"))
    async with watch() as signals:
        symptom = await anext(signals)
        log.write(GONE)
        cleared = await anext(signals)
    async with watch() as signals:
        restated = await anext(signals)

    assert (symptom.code, symptom.state) == ("xid.45", State.RAISED)
    assert (cleared.code, cleared.state) == ("xid.45", State.CLEARED)
    assert (restated.code, restated.severity) == ("xid.79", Severity.FATAL)


async def test_a_new_boot_starts_without_findings(log, watch, tmp_path):
    log.write(GONE, lost=500)
    async with watch() as signals:
        await anext(signals)
    kept = tmp_path / "xid.json"
    kept.write_text(kept.read_text().replace(boot_id(), "another"))
    log.ours.send(record(GONE.replace("79", "62"), 3))
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.62"


async def test_a_corrupt_file_is_ignored(log, watch, tmp_path):
    (tmp_path / "xid.json").write_bytes(b"{half")
    log.write(GONE)
    async with watch() as signals:
        assert (await anext(signals)).code == "xid.79"


async def test_a_gap_is_reported_with_its_size(log, watch):
    log.write("usb 1-1: new device")
    log.write("usb 1-1: new device", lost=41)
    async with watch() as signals:
        signal = await anext(signals)

    assert (signal.code, signal.severity) == ("xid.log_lost", Severity.WARNING)
    assert (signal.count, signal.entity) == (41, "host")


async def test_a_gap_while_the_daemon_was_down_is_reported(log, watch):
    log.write(GONE.replace("79", "13"))
    async with watch() as signals:
        await anext(signals)
    log.write("usb 1-1: new device", lost=3)
    async with watch() as signals:
        signal = await anext(signals)

    assert (signal.code, signal.count) == ("xid.log_lost", 3)


async def test_a_read_only_state_folder_is_reported_and_contained(log, tmp_path):
    missing = tmp_path / "none"
    log.write(GONE)
    async with signals_of(XidDetector(log.open), XidConfig(), missing) as signals:
        codes = [(await anext(signals)).code for _ in range(2)]
        missing.mkdir()
        log.write(GONE.replace("79", "62"))
        while (signal := await anext(signals)).code != codes[1]:
            pass

    assert codes == ["xid.79", "xid.place_not_kept"]
    assert signal.state is State.CLEARED


@contextmanager
def storm(log, text, lines):
    """Written by another thread, as fast as it is read."""
    stop = threading.Event()

    def write():
        try:
            head, _, body = record(text, 0).partition(b",0,")
            for seq in range(1, lines + 1):
                if stop.is_set():
                    return
                log.ours.send(b"%b,%d,%b" % (head, seq, body))
            log.ours.send(record(GONE, lines + 1))
        except OSError:
            return  # the test has closed the log

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        log.ours.shutdown(socket.SHUT_RDWR)
        writer.join()


async def test_a_storm_of_one_line_is_one_finding_with_a_count(log, watch):
    """The event loop turns between lines, and nothing is kept per line."""
    lines = 100_000
    text = "NVRM: Xid (PCI:0000:03:00): 95, pid=1234, name=python3, Uncontained: LTC TAG (0x1,0x0)"
    turns = 0

    async def turn():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    signals = []
    async with watch() as found:
        with storm(log, text, lines):
            while not signals or signals[-1].code != "xid.79":
                signals.append(await anext(found))
            while sum(s.count for s in signals if s.code == "xid.95") < lines:
                signals.append(await anext(found))
    turning.cancel()

    storms = [s for s in signals if s.code == "xid.95"]
    assert sum(s.count for s in storms) == lines
    assert len(signals) < 100
    assert {s.state for s in signals} == {State.RAISED}
    assert turns >= lines / BATCH


def test_a_storm_uses_bounded_memory(tmp_path):
    """All lines differ, from different processes, at full speed."""
    text = "NVRM: Xid (PCI:0000:03:00): 109, pid={}, name=python3, Context Switch Timeout"
    follower = Follower(XidConfig(), load(XidConfig()), tmp_path / "xid.json", 0.0)
    grown = []
    tracemalloc.start()
    try:
        for start in (0, 5_000, 10_000):
            for n in range(start, start + 5_000):
                for _ in follower.take(record(text.format(n), n), 1.0):
                    pass
            grown.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    assert grown[2] - grown[0] < 50_000


# --- the log itself -------------------------------------------------------------------------------


def test_overwritten_and_oversized_records_do_not_stop_the_reading():
    answers = iter([errno.EPIPE, b"a", errno.EINVAL, b"b", errno.EAGAIN])

    def read(fd, size):
        answer = next(answers)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer

    log = KernelLog(-1, read)

    assert log.batch() == [b"a", b"b"]
    assert log.overwritten == 2


def test_another_error_is_not_hidden():
    def read(fd, size):
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        KernelLog(-1, read).batch()


def test_the_first_kept_record_is_no_gap():
    sequence = Sequence(None)

    assert [sequence.new(n, 1.0) for n in (500, 501, 501, 505)] == [True, True, False, True]
    assert sequence.lost == 3


def test_a_host_without_a_kernel_log_gives_the_reason():
    def reason(number):
        return XidDetector(refused(number)).supported_with(XidConfig(events="never"))

    assert "CAP_SYSLOG" in reason(errno.EPERM)
    assert "CAP_SYSLOG" in reason(errno.EACCES)
    assert "No such file" in reason(errno.ENOENT)


async def test_a_configured_source_replaces_the_kernel_log(tmp_path):
    """A pipe written with O_DIRECT keeps records apart as the real log does."""
    place = tmp_path / "kmsg"
    pipe = open_pipe(place)
    detector, config = XidDetector(), XidConfig(source=str(place))
    try:
        os.write(pipe, record("usb 1-1: new device", 1))
        os.write(pipe, record(GONE, 2))
        async with signals_of(detector, config, tmp_path) as signals:
            signal = await anext(signals)
    finally:
        os.close(pipe)
    nowhere = XidConfig(source=str(tmp_path / "none"), events="never")

    assert signal.code == "xid.79"
    assert detector.supported_with(config) is None
    assert f"{nowhere.source} cannot be opened" in detector.supported_with(nowhere)


@pytest.mark.skipif(os.geteuid() != 0, reason="writing to /dev/kmsg needs root")
async def test_the_real_kernel_log_is_read(tmp_path):
    """A line written by user space has facility 1 and counts only if configured."""
    detector = XidDetector()
    why_not = detector.supported()
    if why_not:
        pytest.skip(why_not)
    # A bus address of its own: the log still holds lines of earlier runs.
    place = f"{os.urandom(2).hex()}:{os.urandom(1).hex()}:00"
    kmsg = os.open("/dev/kmsg", os.O_WRONLY)
    os.write(kmsg, f"<0>NVRM: Xid (PCI:{place}): 13, a test\n".encode())
    os.close(kmsg)
    async with signals_of(detector, XidConfig(facilities=(0, 1)), tmp_path) as signals:
        while (signal := await anext(signals)).entity != f"pci:{place}.0":
            pass
    told = await _all_that_is_there(XidConfig(), tmp_path / "other")

    assert signal.code == "xid.13"
    assert f"pci:{place}.0" not in {s.entity for s in told}


async def _all_that_is_there(config, folder):
    """The detector's signals for the whole log, read to its end."""
    folder.mkdir()
    end = threading.Event()
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reader, writer:
        log = KernelLog(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        try:
            raws = [raw for batch in iter(log.batch, []) for raw in batch]
        finally:
            log.close()
        feeder = threading.Thread(target=lambda: ([writer.send(r) for r in raws], end.set()))
        feeder.start()
        found = []
        try:
            async with aclosing(_until_closed(reader, config, folder)) as signals:
                closer = asyncio.get_running_loop().run_in_executor(None, end.wait)
                closer.add_done_callback(lambda _: writer.shutdown(socket.SHUT_WR))
                found = [signal async for signal in signals]
        finally:
            feeder.join()
    return found


async def _until_closed(reader, config, folder):
    reader.setblocking(False)
    detector = XidDetector(lambda place: os.dup(reader.fileno()))
    async with signals_of(detector, config, folder) as signals:
        async for signal in signals:
            if signal.code == "xid.no_log":
                return
            yield signal


async def test_a_fault_that_an_operator_has_declared_over_is_not_stated_again(log, tmp_path):
    """Not after a restart either, unless it recurs."""
    detector = XidDetector(log.open)
    log.write(GONE)
    log.write(GONE.replace("79", "62"))
    async with signals_of(detector, XidConfig(), tmp_path) as signals:
        assert {(await anext(signals)).code for _ in range(2)} == {"xid.79", "xid.62"}
        detector.declared_healthy("xid.79")
    async with signals_of(XidDetector(log.open), XidConfig(), tmp_path) as signals:
        assert (await anext(signals)).code == "xid.62"  # restated
        log.write(GONE)
        assert (await anext(signals)).code == "xid.79"


async def test_a_fault_is_declared_over_before_the_detector_runs(log, tmp_path):
    """It may wait for the log, or for its restart."""
    log.write(GONE)
    async with signals_of(XidDetector(log.open), XidConfig(), tmp_path) as signals:
        await anext(signals)
    detector = XidDetector(log.open)
    detector.declared_healthy("")
    async with signals_of(detector, XidConfig(), tmp_path) as signals:
        log.write(GONE.replace("79", "62"))
        assert (await anext(signals)).code == "xid.62"


def test_findings_may_be_declared_over_between_two_signals(tmp_path):
    """The daemon pauses after some signals."""
    follower = Follower(XidConfig(), load(XidConfig()), tmp_path / "xid.json", 0.0)
    for number, pci in enumerate(("03", "04")):
        text = f"NVRM: Xid (PCI:0000:{pci}:00): 31, pid=1, name=python, MMU Fault"
        list(follower.take(record(text, seq=number), 0.0))
    ends = follower.findings.quiet(1e6, 1.0)
    first = next(ends)
    follower.forget("")

    assert first.state is State.CLEARED
    assert list(ends) == []
