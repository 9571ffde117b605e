"""Interpretation of the readings of a host."""

from __future__ import annotations

import pytest
from tmd_detectors.host.facts import Clock, HostFacts, HostReading, Process, Space
from tmd_detectors.host.judge import HostFindings, HostLimits

from tmd.plugin import Severity, State

DRIVER = Process(pid=7, started=1, name="nvidia-modeset", ticks=5)


@pytest.fixture
def see():
    """Feed facts at a time; returns (code, entity, severity or None if cleared)."""
    findings = HostFindings(HostLimits())

    def observe(now=0.0, spaces=(), hangs=None, clock=None, answered=(), **facts):
        answer = HostReading(HostFacts(**facts), spaces, hangs, clock, answered)
        return [
            (s.code, s.entity, s.severity if s.state is State.RAISED else None)
            for s in findings.observe(answer, now)
        ]

    return observe


def test_a_file_system_that_becomes_read_only_is_degraded(see):
    see(read_only={"/data": False})

    assert see(read_only={"/data": True}) == [
        ("host.disk_read_only", "disk:/data", Severity.DEGRADED)
    ]
    assert see(read_only={"/data": True}) == []
    assert see(read_only={"/data": False}) == [("host.disk_read_only", "disk:/data", None)]


def test_an_intended_read_only_file_system_is_no_finding(see):
    assert see(read_only={"/": True}) == []
    assert see(read_only={"/": True}) == []


@pytest.mark.parametrize(("blocks", "files"), [(2.9, 50), (50, 2.9)])
def test_a_full_file_system_clears_with_a_margin(see, blocks, files):
    full = see(spaces=(Space("/", blocks, files),))
    still = see(spaces=(Space("/", 3.1, 50),))
    well = see(spaces=(Space("/", 4, 50),))

    assert full == [("host.disk_full", "disk:/", Severity.WARNING)]
    assert still == []
    assert well == [("host.disk_full", "disk:/", None)]


def test_a_file_system_that_does_not_answer_is_a_finding(see):
    assert see(hangs="/net") == [("host.disk_hangs", "disk:/net", Severity.WARNING)]
    assert see() == []
    assert see(answered=("/",)) == []
    assert see(answered=("/", "/net")) == [("host.disk_hangs", "disk:/net", None)]


def test_memory_pressure_is_a_finding(see):
    assert see(pressure_percent=20) == []
    assert see(pressure_percent=21) == [("host.memory_pressure", "host", Severity.WARNING)]
    assert see(pressure_percent=18) == []
    assert see(pressure_percent=None) == []
    assert see(pressure_percent=10) == [("host.memory_pressure", "host", None)]


@pytest.mark.parametrize(
    ("field", "code"), [("oom_kills", "host.oom_kill"), ("hung_tasks", "host.hung_task")]
)
def test_a_count_since_boot_is_a_finding_when_it_grows(see, field, code):
    assert see(0, **{field: 7}) == []
    assert see(60, **{field: 8}) == [(code, "host", Severity.WARNING)]
    assert see(120, **{field: 9}) == []
    assert see(719, **{field: 9}) == []
    assert see(720, **{field: 9}) == [(code, "host", None)]


def test_a_driver_process_asleep_at_five_readings_is_a_finding(see):
    """Five readings, a minute apart."""
    assert [see(60 * n, sleeping=(DRIVER,)) for n in range(4)] == [[], [], [], []]
    assert see(240, sleeping=(DRIVER,)) == [("host.driver_stuck", "host", Severity.DEGRADED)]
    assert see(300) == [("host.driver_stuck", "host", None)]


@pytest.mark.parametrize(
    "other",
    [
        Process(pid=7, started=1, name="nvidia-modeset", ticks=6),
        Process(pid=7, started=2, name="nvidia-modeset", ticks=5),
        Process(pid=8, started=1, name="nvidia-modeset", ticks=5),
    ],
    ids=["it ran in between", "its pid was used again", "another process"],
)
def test_a_driver_process_that_sleeps_briefly_is_no_finding(see, other):
    said = [see(60 * n, sleeping=(DRIVER if n % 2 else other,)) for n in range(12)]

    assert said == [[]] * 12


def test_an_unsynchronised_clock_is_reported_after_half_an_hour(see):
    loose, tight = Clock(synchronised=False, offset_s=0), Clock(synchronised=True, offset_s=0)

    assert see(0, clock=loose) == []
    assert see(1799, clock=loose) == []
    assert see(1800, clock=loose) == [("host.clock_unsynchronised", "host", Severity.WARNING)]
    assert see(1860) == []
    assert see(1920, clock=tight) == [("host.clock_unsynchronised", "host", None)]


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_clock_that_is_off_is_a_finding(see, sign):
    def at(offset_s):
        return see(clock=Clock(synchronised=True, offset_s=sign * offset_s))

    assert at(0.1) == []
    assert at(0.11) == [("host.clock_skew", "host", Severity.WARNING)]
    assert at(0.09) == []
    assert at(0.01) == [("host.clock_skew", "host", None)]
