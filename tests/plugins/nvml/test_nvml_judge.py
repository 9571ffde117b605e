"""Interpretation of the readings of GPUs."""

from __future__ import annotations

import pytest
from tmd_detectors.nvml.judge import Judge
from tmd_detectors.nvml.report import Gpu, NvmlReport

from tmd.plugin import Severity, State

PCI = "0000:3b:00.0"
GPU = Gpu(PCI, recovery=0, remap_pending=False, remap_failed=False, uncorrected=0)
FATAL, DEGRADED, WARNING = Severity.FATAL, Severity.DEGRADED, Severity.WARNING
RAISED, CLEARED = State.RAISED, State.CLEARED
EVERY_S = 10.0


class Host:
    """Reads every ``every_s`` seconds."""

    def __init__(self, gpus=0, known=(), every_s=EVERY_S):
        self.judge = Judge(gpus, every_s, known)
        self._every_s = every_s
        self._now = 0.0

    def sees(self, times=1, **changes):
        return self.shows(NvmlReport(gpus=(GPU._replace(**changes),)), times)

    def counts(self, **changes):
        """The counts of all signals of one reading."""
        self._now += EVERY_S
        report = NvmlReport(gpus=(GPU._replace(**changes),))
        return [signal.count for signal in self.judge.observe(report, self._now)]

    def shows(self, report, times=1):
        """(code without prefix, severity, state) of all signals of the last reading."""
        for _ in range(times):
            self._now += EVERY_S
            found = list(self.judge.observe(report, self._now))
        return [brief(s) for s in found]


def brief(signal):
    return signal.code.removeprefix("nvml."), signal.severity, signal.state


@pytest.fixture
def host():
    return Host()


def test_a_healthy_gpu_gives_no_signal(host):
    assert host.sees(times=100) == []


@pytest.mark.parametrize(
    ("action", "severity"),
    [
        (1, FATAL),
        (2, FATAL),
        (3, DEGRADED),
        (4, DEGRADED),
        (5, FATAL),
        (6, FATAL),
        (7, FATAL),
        (42, WARNING),
    ],
)
def test_the_recovery_action_is_the_drivers_verdict(host, action, severity):
    first = host.sees(recovery=action)
    again = host.sees(recovery=action)
    unreadable = host.sees(recovery=None)

    assert first == [("recovery_action", severity, RAISED)]
    assert (again, unreadable) == ([], [])
    assert host.sees(recovery=0) == [("recovery_action", severity, CLEARED)]


def test_another_remedy_of_the_same_severity_replaces_the_first():
    """A reset does not help a GPU whose driver has asked for a reboot since."""
    judge = Judge(0, EVERY_S)
    says = [
        signal.message
        for action in (1, 2, 2)
        for signal in judge.observe(NvmlReport(gpus=(GPU._replace(recovery=action),)), 0.0)
    ]

    assert says == ["the driver asks for a GPU reset", "the driver asks for a reboot of the host"]


def test_a_milder_action_clears_the_severer_one(host):
    host.sees(recovery=2)

    assert host.sees(recovery=3) == [
        ("recovery_action", FATAL, CLEARED),
        ("recovery_action", DEGRADED, RAISED),
    ]


@pytest.mark.parametrize("code", [11, 14, 15, 16])
def test_a_return_code_that_means_a_fault_is_a_finding(host, code):
    assert host.sees(codes={"f": 3, "g": code}) == [("gpu_broken", FATAL, RAISED)]
    assert host.sees() == [("gpu_broken", FATAL, CLEARED)]


@pytest.mark.parametrize("code", [2, 3, 4, 13, 19])
def test_an_unavailable_fact_is_none(host, code):
    assert host.sees(codes={"f": code}, times=10) == []


def test_an_unsupported_fact_leaves_its_finding(host):
    host.sees(remap_pending=True)

    assert host.sees(remap_pending=None, codes={"nvmlDeviceGetRemappedRows": 3}) == []
    assert host.sees() == [("remap_pending", DEGRADED, CLEARED)]


def test_an_unknown_error_is_believed_if_it_persists(host):
    codes = {"nvmlDeviceGetTemperature": 999}

    assert host.sees(codes=codes, times=2) == []
    assert host.sees(codes=codes) == [("gpu_broken", FATAL, RAISED)]


def test_an_unknown_error_of_a_call_that_not_every_gpu_answers_is_no_fault(host):
    assert host.sees(codes={"nvmlDeviceGetSramEccErrorStatus": 999}, times=10) == []


@pytest.mark.parametrize("fact", ["remap_pending", "remap_failed", "sram_threshold"])
def test_a_pending_memory_repair_is_degraded(host, fact):
    assert host.sees(**{fact: True}) == [(fact, DEGRADED, RAISED)]
    assert host.sees(**{fact: False}) == [(fact, DEGRADED, CLEARED)]


def test_only_new_uncorrectable_errors_count(host):
    """They are fatal by themselves; a driver that requests no recovery has contained them."""
    old = [host.sees(uncorrected=5), host.sees(uncorrected=5)]
    contained = host.sees(uncorrected=6)
    another = Host()
    another.sees(recovery=None, uncorrected=5)

    assert old == [[], []]
    assert contained == [("ecc", DEGRADED, RAISED)]
    assert host.sees(uncorrected=0) == [("ecc", DEGRADED, CLEARED)]
    assert another.sees(recovery=None, uncorrected=6) == [("ecc", FATAL, RAISED)]


@pytest.mark.parametrize("bit", [0x8, 0x40, 0x80])
def test_a_forced_slow_down_is_reported_and_six_in_ten_minutes_degrade(host, bit):
    assert host.sees(reasons=bit) == [("slowed", WARNING, RAISED)]
    assert host.sees(reasons=bit, times=4) == []
    assert host.sees(reasons=bit) == [("slowed", DEGRADED, RAISED)]
    assert host.sees(reasons=0, times=60) == []
    assert host.sees(reasons=0) == [("slowed", DEGRADED, CLEARED)]


def test_slow_downs_far_apart_do_not_degrade(host):
    for _ in range(10):
        assert DEGRADED not in [s for _, s, _ in host.sees(reasons=0x8)]
        host.sees(reasons=0, times=20)


def test_a_slow_down_does_not_become_milder_before_it_has_ended(host):
    """Otherwise one episode would count as several, and so as a finding that recurs."""
    found = []
    for now in range(10, 1700, 10):
        slow = now in (10, 100, 200, 300, 400, 500, 620, 820, 900, 1010)
        found += [(now, *signal) for signal in host.sees(reasons=0x40 if slow else 0)]

    assert found == [
        (10, "slowed", WARNING, RAISED),
        (500, "slowed", DEGRADED, RAISED),
        (1620, "slowed", DEGRADED, CLEARED),
    ]
    assert host.sees(reasons=0x40) == [("slowed", WARNING, RAISED)]


def test_six_slow_readings_in_a_row_degrade_however_long_the_interval():
    host = Host(every_s=300.0)

    assert host.sees(reasons=0x8, times=5) == []
    assert host.sees(reasons=0x8) == [("slowed", DEGRADED, RAISED)]


def test_a_power_cap_or_idling_is_normal(host):
    assert host.sees(reasons=0x4 | 0x1, times=100) == []


def test_overheating_clears_some_degrees_lower(host):
    assert host.sees(temperature=89, below_slowdown=1) == []
    assert host.sees(temperature=90, below_slowdown=0) == [("hot", WARNING, RAISED)]
    assert host.sees(temperature=86, below_slowdown=4) == []
    assert host.sees(temperature=84, below_slowdown=6) == [("hot", WARNING, CLEARED)]


def test_a_narrow_pcie_link_counts_only_under_load(host):
    idle = host.sees(width=8, max_width=16, reasons=0x1, times=50)
    twice = host.sees(width=8, max_width=16, reasons=0, times=2)

    assert (idle, twice) == ([], [])
    assert host.sees(width=8, max_width=16, reasons=0) == [("pcie_narrow", WARNING, RAISED)]
    assert host.sees(width=8, max_width=16, reasons=1) == []
    assert host.sees(width=16, max_width=16, reasons=0) == [("pcie_narrow", WARNING, CLEARED)]


def test_a_link_that_was_up_and_stays_down_is_a_finding(host):
    host.sees(links={0: True, 1: False})

    assert host.sees(links={0: False, 1: False}, times=2) == []
    assert host.sees(links={0: False, 1: False}) == [("link_down", DEGRADED, RAISED)]
    assert host.sees(links={0: True, 1: False}) == [("link_down", DEGRADED, CLEARED)]


def test_a_link_that_is_down_stays_so_while_its_state_cannot_be_read(host):
    host.sees(links={0: True, 1: True})
    host.sees(links={0: False, 1: True}, times=3)

    assert host.sees(links={1: True}, times=3) == []
    assert host.sees(links={0: True, 1: True}) == [("link_down", DEGRADED, CLEARED)]


def test_a_link_is_bad_when_most_of_its_last_readings_are(host):
    """More than 15 of 30; the first reading is the baseline."""
    seen = [host.sees(link_errors=n) for n in range(100, 116)]

    assert seen == [[]] * 16
    assert host.sees(link_errors=116) == [("link_errors", DEGRADED, RAISED)]
    for _ in range(14):
        assert host.sees(link_errors=116) == []
    assert host.sees(link_errors=116) == [("link_errors", DEGRADED, CLEARED)]


# --- the host -------------------------------------------------------------------------------------

HEALTHY = NvmlReport(gpus=(GPU,))


def test_a_gpu_that_nvml_no_longer_shows_is_a_finding(host):
    host.shows(HEALTHY)

    assert host.shows(NvmlReport(), times=2) == []
    assert host.shows(NvmlReport()) == [("missing", FATAL, RAISED)]
    assert host.shows(NvmlReport(codes={"nvmlInit": 9})) == [("driver", FATAL, RAISED)]
    assert set(host.shows(HEALTHY)) == {
        ("missing", FATAL, CLEARED),
        ("driver", FATAL, CLEARED),
    }


def test_a_gpu_that_nvml_no_longer_opens_is_a_finding(host):
    """Such as one whose power cable is loose (8). Nothing that stood before ends by it."""
    refused = {"codes": {"nvmlDeviceGetHandleByIndex": 8}}
    host.shows(HEALTHY)
    host.sees(codes={"nvmlDeviceGetHandleByIndex": 15})

    assert host.sees(times=2, **refused) == []
    assert host.sees(**refused) == [("missing", FATAL, RAISED)]
    assert set(host.shows(HEALTHY)) == {("missing", FATAL, CLEARED), ("gpu_broken", FATAL, CLEARED)}


def test_a_judge_after_a_restart_expects_what_was_there_before(host):
    """A lost GPU, a lost link, a driver that is gone, and errors that no reset has ended."""
    host.sees(links={0: True, 1: False}, uncorrected=2)
    host.sees(links={0: True, 1: False}, uncorrected=3)
    lost, driver = (Host(known=host.judge.known) for _ in range(2))
    later = Host(known=host.judge.known)

    assert lost.shows(NvmlReport(), times=3) == [("missing", FATAL, RAISED)]
    assert driver.shows(NvmlReport(codes={"nvmlInit": 9})) == [("driver", FATAL, RAISED)]
    assert later.sees(links={0: False, 1: False}, uncorrected=3) == [("ecc", DEGRADED, RAISED)]
    assert later.sees(times=2, links={0: False, 1: False}, uncorrected=3) == [
        ("link_down", DEGRADED, RAISED)
    ]


@pytest.mark.parametrize("code", ["nvml.link_down", "nvml.ecc", ""])
def test_what_an_operator_has_declared_healthy_is_not_reported_after_a_restart(host, code):
    host.sees(links={0: True}, uncorrected=2)
    host.sees(times=3, links={0: False}, uncorrected=3)
    host.judge.forget(code)
    again = Host(known=host.judge.known)
    errors = [] if code in ("", "nvml.ecc") else [("ecc", DEGRADED, RAISED)]
    link = [] if code in ("", "nvml.link_down") else [("link_down", DEGRADED, RAISED)]

    assert again.sees(links={0: False}, uncorrected=3) == errors
    assert again.sees(times=2, links={0: False}, uncorrected=3) == link


@pytest.mark.parametrize("code", ["nvml.driver", ""])
def test_a_driver_that_was_unloaded_on_purpose_is_forgotten(host, code):
    gone = NvmlReport(codes={"nvmlInit": 9})
    host.shows(HEALTHY)
    host.shows(gone)
    host.judge.forget(code)

    assert host.judge.known == ()
    assert Host(known=host.judge.known).shows(gone) == [("driver", WARNING, RAISED)]


def test_a_gpu_that_was_removed_on_purpose_is_forgotten_and_no_other(host):
    """Also if the driver is unloaded just then: the errors of the others are not settled."""
    other = GPU._replace(pci="0000:3c:00.0", uncorrected=0)
    host.shows(NvmlReport(gpus=(GPU, other)))
    host.shows(NvmlReport(gpus=(GPU._replace(uncorrected=3),)), times=3)
    host.shows(NvmlReport(codes={"nvmlInit": 9}))
    host.judge.forget("nvml.missing")
    again = Host(known=host.judge.known)

    assert [gpu.pci for gpu in host.judge.known] == [PCI]
    assert again.shows(NvmlReport(codes={"nvmlInit": 9})) == [("driver", FATAL, RAISED)]
    assert again.sees(uncorrected=3) == [("driver", FATAL, CLEARED), ("ecc", DEGRADED, RAISED)]


def test_errors_that_a_reset_has_ended_are_not_reported_after_a_restart(host):
    host.sees(uncorrected=5)
    host.sees(uncorrected=6)
    host.sees(uncorrected=0)
    again = Host(known=host.judge.known)

    assert again.sees(uncorrected=0) == []
    assert again.sees(uncorrected=1) == [("ecc", DEGRADED, RAISED)]


def test_a_gpu_that_nvml_never_showed_may_belong_to_another_container(host):
    report = NvmlReport(gpus=(GPU,), bound=(PCI, "0000:3c:00.0"))

    assert host.shows(report, times=3) == [("missing", WARNING, RAISED)]


def test_a_vanished_driver_is_fatal_and_an_absent_one_is_not(host):
    gone = NvmlReport(codes={"nvmlInit": 9})
    never = Host().shows(gone)
    host.shows(HEALTHY)

    assert never == [("driver", WARNING, RAISED)]
    assert host.shows(gone) == [("driver", FATAL, RAISED)]
    assert host.shows(HEALTHY) == [("driver", FATAL, CLEARED)]


def test_another_library_error_is_reported(host):
    assert host.shows(NvmlReport(codes={"nvmlInit": 18})) == [("failed", WARNING, RAISED)]
    assert host.shows(HEALTHY) == [("failed", WARNING, CLEARED)]


def test_fewer_gpus_than_expected_is_a_finding():
    host = Host(gpus=2)

    assert host.shows(HEALTHY, times=3) == [("count", WARNING, RAISED)]


def test_a_hang_worsens_and_clears(host):
    reported = [[brief(s) for s in host.judge.hung(n, "no answer")] for n in (1, 2, 3, 0)]

    assert reported[0] == [("hung", WARNING, RAISED)]
    assert reported[1] == [("hung", DEGRADED, RAISED)]
    assert reported[2] == []
    assert reported[3] == [("hung", DEGRADED, CLEARED)]


def test_further_ecc_errors_are_counted(host):
    """Also after an operator has declared the first ones over, of which the judge knows nothing."""
    found = [host.counts(uncorrected=n) for n in (0, 1, 1, 5, 9)]

    assert found == [[], [1], [], [4], [4]]
