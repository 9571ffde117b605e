"""NVML's events through the real bindings, beside a kernel log or instead of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import pytest
from tmd_detectors.xid.detector import NO_EVENTS, XidConfig, XidDetector
from tmd_detectors.xid.events import BINDINGS, LIBRARY, LISTENER, Events
from tmd_detectors.xid.findings import CONFIRMED
from tmd_detectors.xid.xid_event import XidEvent

from tests.plugins.context import signals_of
from tmd.plugin import Severity, State, bare_python, readable

from .log import refused

FIRST, SECOND = "0000:3b:00.0", "0000:3c:00.0"
GONE = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
BESIDE = XidConfig(events="always")
NO_LOG = refused(errno.EACCES)


@pytest.fixture
def watch(script, shim, tmp_path):
    """The signals of a detector; its folder is kept."""

    def run(open_log, config):
        return signals_of(XidDetector(open_log, str(shim / LIBRARY)), config, tmp_path)

    return run


class Clock:
    """Advances only when a test moves it."""

    def __init__(self):
        self.now = 0.0
        self.events = Events(30.0)

    async def receive(self, wanted):
        """The events received until ``wanted`` was true."""
        found = []
        while not wanted(found):
            found += self.events.take(self.now)
            if not wanted(found):
                fd = self.events.fd
                await readable([fd] if fd is not None else [], 0.05)
        return found

    async def ended(self):
        """Wait until the listener has ended and another may start."""
        await self.receive(lambda _: self.events.fd is not None)
        await self.receive(lambda _: self.events.fd is None)
        self.now += 60.0


@pytest.fixture
async def clock(script):
    clock = Clock()
    yield clock
    await clock.events.close()


# --- output of the listener -----------------------------------------------------------------------


async def test_an_event_carries_gpu_and_number(clock, script):
    script.event(1, 79)
    script.event(0, 94, instance=5)
    received = await clock.receive(lambda found: len(found) == 2)

    assert received == [XidEvent(79, SECOND), XidEvent(94, FIRST, "GPU-I:05")]
    assert clock.events.problem == ""


async def test_events_of_other_kinds_and_xid_0_are_ignored(clock, script):
    script.event(0, 0)
    script.event(0, 48, kind=0x2)
    script.event(0, 0, kind=0x8000)
    script.event(0, 62)

    assert await clock.receive(bool) == [XidEvent(62, FIRST)]


async def test_the_recovery_action_comes_with_xid_154(clock, script):
    script.put({"1.field230": 4})
    script.event(1, 154)
    with_field = await clock.receive(bool)
    script.put({"field230": None})
    script.event(0, 154)

    assert with_field == [XidEvent(154, SECOND, action=4)]
    assert await clock.receive(bool) == [XidEvent(154, FIRST)]


async def test_a_lost_gpu_is_known_by_the_address_it_had(clock, script):
    script.event(0, 13)
    await clock.receive(bool)
    script.put({"1.nvmlDeviceGetPciInfo_v3.ret": 15})
    script.event(1, 79)

    assert await clock.receive(bool) == [XidEvent(79, SECOND)]


@pytest.mark.parametrize(
    "facts",
    [
        {"1.events": 0},
        {"1.nvmlDeviceGetSupportedEventTypes.ret": 3},
        {"1.nvmlDeviceRegisterEvents.ret": 15},
        {"1.nvmlDeviceGetHandleByIndex_v2.ret": 15},
    ],
    ids=lambda facts: next(iter(facts)),
)
async def test_a_gpu_without_facts_does_not_hide_the_others(clock, script, facts):
    script.put(facts)
    script.event(0, 79)

    assert await clock.receive(bool) == [XidEvent(79, FIRST)]
    assert clock.events.problem.startswith("GPU 1: ")


async def test_a_driver_without_events_is_reported_once(clock, script):
    script.put({"events": 0})
    await clock.ended()
    after_one = clock.events.problem
    await clock.ended()

    assert after_one == ""
    assert clock.events.problem == "GPU 0: does not report XIDs; GPU 1: does not report XIDs"
    clock.now -= 60.0
    clock.events.take(clock.now)
    assert clock.events.fd is None  # not before the pause is over


async def test_a_gpu_lost_during_the_wait_restarts_the_listener(clock, script):
    """The wait returns GPU_IS_LOST for any GPU: events of the others must still arrive."""
    script.event(0, 13)
    await clock.receive(bool)
    script.put({"nvmlEventSetWait_v2.ret": 15, "1.nvmlDeviceRegisterEvents.ret": 15})
    script.event(0, 0)  # ends the current wait
    await clock.ended()
    await clock.ended()
    problem = clock.events.problem
    script.put({"nvmlEventSetWait_v2.ret": None})
    script.event(0, 62)

    assert problem == "nvmlEventSetWait_v2 returned 15"
    assert await clock.receive(bool) == [XidEvent(62, FIRST)]
    assert clock.events.problem == "GPU 1: nvmlDeviceRegisterEvents returned 15"


async def test_events_of_a_driver_loaded_later_are_received(clock, script):
    script.put({"nvmlInitWithFlags.ret": 9})
    await clock.ended()
    await clock.ended()
    problem = clock.events.problem
    script.put({"nvmlInitWithFlags.ret": None})
    script.event(0, 79)

    assert problem == "nvmlInit returned 9"
    assert await clock.receive(bool) == [XidEvent(79, FIRST)]
    assert clock.events.problem == ""


async def test_a_hanging_listener_is_abandoned_and_replaced(clock, script):
    script.put({"nvmlEventSetWait_v2.delay": "inf"})
    await clock.receive(lambda _: clock.events.fd is not None)
    await readable([clock.events.fd], 30)  # it has reported the GPUs it listens to
    clock.events.take(clock.now)
    clock.now += 31.0
    clock.events.take(clock.now)
    left, problem = clock.events.fd, clock.events.problem
    script.put({"nvmlEventSetWait_v2.delay": None})
    script.event(0, 79)
    clock.now += 60.0

    assert (left, problem) == (None, "the driver did not answer within 30 s")
    assert await clock.receive(bool) == [XidEvent(79, FIRST)]
    assert clock.events.problem == ""


def test_a_listener_without_a_daemon_ends(script):
    listener = subprocess.Popen(
        bare_python(LISTENER, "10", needs=(BINDINGS,)), stdout=subprocess.PIPE
    )
    first = listener.stdout.readline()
    listener.stdout.close()

    assert listener.wait(30) is not None
    assert json.loads(first) == list(XidEvent(gpus=2, deaf=[]))


# --- beside the log, and instead of it ------------------------------------------------------------


async def test_the_line_and_the_event_of_one_fault_are_one_alert(log, script, watch):
    log.write(GONE)
    script.event(0, 79)
    async with watch(log.open, BESIDE) as signals:
        line, both = await anext(signals), await anext(signals)
        log.write(GONE.replace("79", "62"))
        next_one = await anext(signals)

    assert (line.code, line.entity) == (both.code, both.entity) == ("xid.79", f"pci:{FIRST}")
    assert (line.count, both.count) == (1, 0)
    assert {GONE, CONFIRMED} < set(both.evidence)
    assert next_one.code == "xid.62"


async def test_an_event_whose_line_never_comes_is_an_alert(log, script, watch):
    script.event(1, 79)
    async with watch(log.open, BESIDE) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.entity) == ("xid.79", f"pci:{SECOND}")
    assert signal.severity is Severity.FATAL


async def test_a_line_without_an_event_is_an_alert(log, watch):
    log.write(GONE)
    async with watch(log.open, BESIDE) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.count) == ("xid.79", 1)
    assert CONFIRMED not in signal.evidence


async def test_a_hanging_driver_does_not_stop_reading_the_log(log, script, watch):
    script.put({"nvmlEventSetWait_v2.delay": "inf"})
    config = XidConfig(events="always", events_deadline_s=0.5)
    async with watch(log.open, config) as signals:
        deaf = await anext(signals)
        log.write(GONE)
        received = await anext(signals)

    assert (deaf.code, deaf.severity, deaf.state) == (NO_EVENTS, Severity.WARNING, State.RAISED)
    assert "did not answer" in deaf.message
    assert received.code == "xid.79"


async def test_a_host_without_log_access_receives_xid_events(script, watch):
    script.event(1, 94)
    async with watch(NO_LOG, XidConfig()) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.severity) == ("xid.94", Severity.DEGRADED)
    assert signal.entity == f"pci:{SECOND}"


async def test_a_host_with_switches_and_without_log_access_says_what_it_does_not_see(
    shim, tmp_path
):
    """NVML has no events of NVSwitches. Other hosts are told of all by it."""
    switches = tmp_path / "devices"
    detector = XidDetector(NO_LOG, str(shim / LIBRARY), switches)
    without = [detector._unseen(XidConfig())]
    switches.mkdir()  # the driver makes it on each host
    without.append(detector._unseen(XidConfig()))
    (switches / "0000:05:00.0").mkdir()
    async with signals_of(detector, XidConfig(), tmp_path) as signals:
        signal = await anext(signals)

    assert without == ["", ""]
    assert signal.code == "xid.no_log"
    assert "CAP_SYSLOG; faults of this host's NVSwitches are not seen" in signal.message


async def test_without_a_log_a_lost_gpu_is_still_lost_after_a_restart(script, watch):
    script.event(0, 79)
    async with watch(NO_LOG, XidConfig()) as signals:
        first = await anext(signals)
    async with watch(NO_LOG, XidConfig()) as signals:
        again = await anext(signals)
        script.event(0, 79)
        counted = await anext(signals)

    assert first == again
    assert (counted.code, counted.count) == ("xid.79", 1)


async def test_no_listener_runs_if_the_log_is_readable_unless_configured(log, script, watch):
    """A listener would have taken the event."""
    script.event(1, 62)
    codes = []
    for config in (XidConfig(), XidConfig(events="never"), BESIDE):
        log.write(GONE.replace("79", "13"))
        async with watch(log.open, config) as signals:
            codes.append((await anext(signals)).code)
            if config is BESIDE:
                codes.append((await anext(signals)).code)

    assert codes == ["xid.13", "xid.13", "xid.13", "xid.62"]


def test_the_working_sources_of_this_host_are_reported(log, shim):
    library = str(shim / LIBRARY)
    reads, refuses = XidDetector(log.open, library), XidDetector(NO_LOG, library)
    neither = XidDetector(NO_LOG, "libnowhere.so.1")
    auto, never = XidConfig(), XidConfig(events="never")

    assert reads.sources_with(auto) == (
        "/dev/kmsg; NVML events: not needed where the log can be read"
    )
    assert reads.sources_with(BESIDE) == "/dev/kmsg; NVML events: yes"
    assert "CAP_SYSLOG; NVML events: yes" in refuses.sources_with(auto)
    assert [d.supported_with(auto) for d in (reads, refuses)] == [None, None]
    assert "CAP_SYSLOG" in neither.supported_with(auto)
    assert "the NVIDIA driver is not installed" in neither.supported_with(auto)
    assert "switched off" in refuses.supported_with(never)


async def test_a_host_without_either_source_gives_both_reasons(tmp_path):
    detector = XidDetector(refused(errno.ENOENT), "libnowhere.so.1")
    async with signals_of(detector, XidConfig(), tmp_path) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.state) == ("xid.no_log", State.RAISED)
    assert os.strerror(errno.ENOENT) in signal.message
