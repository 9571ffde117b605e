"""Interpretation of snapshots of network ports."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.nic.counters import CounterHistory
from tmd_detectors.nic.judge import NicFindings, NicRules
from tmd_detectors.nic.links import LinkLimits
from tmd_detectors.nic.snapshot import ABSENT, Medium, Port, Snapshot

from tmd.plugin import Severity, State

PORT = Port(
    name="mlx5_0/1",
    identity="guid/1",
    medium=Medium.INFINIBAND,
    up=True,
    state="4: ACTIVE",
    rate_mb=400_000,
    counters={"link_downed": 0},
)
DOWN = PORT._replace(up=False, state="1: DOWN", rate_mb=None)
RAISED, CLEARED = State.RAISED, State.CLEARED
RULES_OF_ALL = NicRules()


@pytest.fixture
def see():
    """Feed ports at a time; returns (code, severity or None if cleared)."""
    findings = NicFindings(NicRules())

    def observe(now, *ports):
        return codes(findings.observe(Snapshot(ports), now))

    return observe


def codes(signals):
    return [(s.code, s.severity if s.state is RAISED else None) for s in signals]


def counting(**counters):
    return PORT._replace(counters=counters)


# --- links ----------------------------------------------------------------------------------------


def test_down_is_raised_after_its_hold_and_cleared_at_once(see):
    see(0, PORT)

    assert see(5, DOWN) == []
    assert see(14.9, DOWN) == []
    assert see(15, DOWN) == [("nic.down", Severity.FATAL)]
    assert see(20, DOWN) == []
    assert see(25, PORT) == [("nic.down", None)]


def test_a_port_that_was_never_up_is_no_finding(see):
    """The first observed state is never fatal."""
    assert [see(t, DOWN) for t in (0, 100, 1000)] == [[], [], []]


def test_an_expected_port_that_was_never_up_is_a_finding():
    findings = NicFindings(NicRules(expect=("mlx5_0/1",)))
    first = codes(findings.observe(Snapshot((DOWN,)), 0))

    assert first == []
    assert codes(findings.observe(Snapshot((DOWN,)), 10)) == [("nic.down", Severity.FATAL)]


def test_an_unknown_state_changes_nothing(see):
    unknown = PORT._replace(up=None, state="2: INIT", rate_mb=None)
    see(0, PORT)

    assert [see(t, unknown) for t in (5, 50, 500)] == [[], [], []]


def test_a_drop_holds_ten_minutes_after_the_recovery(see):
    see(0, PORT)
    see(0, DOWN)
    down = see(10, DOWN)
    before, at = see(239, DOWN), see(240, DOWN)
    back = see(300, PORT)

    assert down == [("nic.down", Severity.FATAL)]
    assert (before, at) == ([], [("nic.drop", Severity.DEGRADED)])
    assert back == [("nic.down", None)]
    assert see(899, PORT) == []
    assert see(900, PORT) == [("nic.drop", None)]


def test_a_link_that_came_up_in_between_has_not_dropped(see):
    """``link_downed`` changed although it was down at each snapshot."""
    moved = DOWN._replace(counters={"link_downed": 1})
    see(0, PORT)
    see(0, DOWN)
    see(200, moved)

    assert "nic.drop" not in dict(see(300, moved))
    assert ("nic.drop", Severity.DEGRADED) in see(440, moved)


def bounce(see, start, lasts):
    see(start, PORT)
    see(start, DOWN)
    for t in range(int(start), int(start + lasts), 5):
        see(t, DOWN)
    return see(start + lasts, PORT)


def test_three_outages_in_twelve_hours_are_flapping(see):
    first, second = bounce(see, 0, 25), bounce(see, 20_000, 25)
    third = bounce(see, 43_000, 25)

    assert "nic.flap" not in dict(first + second)
    assert ("nic.flap", Severity.DEGRADED) in third
    assert see(43_025 + 43_199, PORT) == []
    assert see(43_025 + 43_200, PORT) == [("nic.flap", None)]


def test_short_or_rare_outages_are_no_flapping(see):
    short = [bounce(see, start, 24) for start in (0, 1000, 2000, 3000)]
    rare = [bounce(see, start, 25) for start in (10_000, 40_000, 70_000)]

    assert "nic.flap" not in dict(chain.from_iterable(short + rare))


def test_flapping_can_end_before_its_window_has_passed():
    findings = NicFindings(NicRules(links=LinkLimits(flap_hold_s=3600)))

    def see(now, *ports):
        return codes(findings.observe(Snapshot(ports), now))

    found = [bounce(see, start, 30) for start in (0, 600, 1200)]

    assert ("nic.flap", Severity.DEGRADED) in found[-1]
    assert see(1230 + 3599, PORT) == []
    assert see(1230 + 3600, PORT) == [("nic.flap", None)]
    assert ("nic.flap", Severity.DEGRADED) in bounce(see, 6000, 30)  # the fourth of the window


def test_flapping_can_hold_until_a_person_acts():
    findings = NicFindings(NicRules(links=LinkLimits(flap_hold_s=0)))

    def see(now, *ports):
        return codes(findings.observe(Snapshot(ports), now))

    for start in (0, 100, 200):
        bounce(see, start, 30)

    assert ("nic.flap", None) not in see(1e7, PORT)


def test_a_lower_rate_is_a_warning(see):
    slow = PORT._replace(rate_mb=200_000)
    see(0, PORT)
    see(5, slow)

    assert see(15, slow) == [("nic.slow", Severity.WARNING)]
    assert see(20, PORT) == [("nic.slow", None)]


def test_a_device_is_gone_after_three_snapshots_and_the_hold(see):
    see(0, PORT)

    assert [see(t) for t in (5, 9)] == [[], []]
    assert see(15) == [("nic.gone", Severity.FATAL)]
    assert see(20) == []
    assert see(25, PORT) == [("nic.gone", None)]


def test_a_device_is_not_gone_after_its_hold_alone(see):
    """Two distant snapshots may both fall into a reset."""
    see(0, PORT)

    assert [see(t) for t in (50, 100)] == [[], []]
    assert see(150) == [("nic.gone", Severity.FATAL)]


def test_a_port_missing_from_the_start_is_a_finding_if_expected():
    findings = NicFindings(NicRules(expect=("mlx5_0/1",)))
    empty = [codes(findings.observe(Snapshot(), t)) for t in (0, 5, 10)]

    assert empty == [[], [], [("nic.gone", Severity.FATAL)]]
    assert codes(findings.observe(Snapshot((PORT,)), 15)) == [("nic.gone", None)]
    assert codes(findings.observe(Snapshot((PORT,)), 20)) == []


def test_an_expected_port_that_is_not_watched_is_not_missing():
    """It is there, whatever name and scope it has."""
    there = PORT._replace(interface="eth0")
    findings = NicFindings(NicRules(expect=("mlx5_0/1", "eth0")))
    looks = [codes(findings.observe(Snapshot(outside=(there,)), t)) for t in (0, 5, 10, 15)]

    assert looks == [[]] * 4


def test_an_expected_port_that_is_named_by_its_interface_is_a_finding():
    """Missing first, then down, then missing again: never twice under both names."""
    named = DOWN._replace(interface="eth0", medium=Medium.ROCE)
    findings = NicFindings(NicRules(expect=("eth0",)))
    found = []
    for now, ports in enumerate(((), (named,), ())):
        for look in range(4):
            found += codes(findings.observe(Snapshot(ports), 100 * now + 5 * look))

    assert found == [
        ("nic.gone", Severity.FATAL),
        ("nic.gone", None),
        ("nic.down", Severity.FATAL),
        ("nic.gone", Severity.FATAL),
    ]


def test_renumbering_is_neither_loss_nor_fault(see):
    """The same GUID under another name."""
    other = PORT._replace(name="mlx5_3/1")
    see(0, PORT)

    assert [see(t, other) for t in (5, 50, 500)] == [[], [], []]


def test_a_port_that_is_down_stays_down_under_another_name():
    """A reset may renumber devices and mend nothing."""
    findings = NicFindings(NicRules())
    down = PORT._replace(up=False)
    renumbered = down._replace(name="mlx5_3/1")
    story = [(0, PORT), (5, down), (20, down), (60, renumbered), (70, renumbered)]
    found = [
        (signal.entity, signal.state)
        for at, port in story
        for signal in findings.observe(Snapshot((port,)), at)
        if signal.code == "nic.down"
    ]

    assert found == [
        ("nic:mlx5_0/1", RAISED),
        ("nic:mlx5_0/1", State.CLEARED),
        ("nic:mlx5_3/1", RAISED),
    ]


def test_two_ports_that_are_down_stay_down_when_they_swap_their_names():
    findings = NicFindings(NicRules())
    names = [PORT.name, "mlx5_1/1"]
    standing = set()
    for at, up, now_called in [(0, True, names), (5, False, names), (20, False, names[::-1])]:
        ports = [
            PORT._replace(identity=f"guid/{number}", name=name, up=up)
            for number, name in enumerate(now_called)
        ]
        for seen_at in (at, at + 10):
            for signal in findings.observe(Snapshot(tuple(ports)), seen_at):
                change = standing.add if signal.state is RAISED else standing.discard
                change((signal.code, signal.entity))

    assert standing == {("nic.down", f"nic:{name}") for name in names}


def test_two_ports_that_are_down_and_swap_their_names_may_come_back_at_different_times():
    """The first one keeps its finding when the second one follows."""
    findings = NicFindings(NicRules())
    a, b = PORT._replace(identity="a"), PORT._replace(identity="b", name="mlx5_1/1")
    a_down, b_down = a._replace(up=False), b._replace(up=False)
    a_later, b_later = a_down._replace(name=b.name), b_down._replace(name=a.name)
    standing = set()
    story = [
        *[(0, (a, b)), (5, (a_down, b_down)), (20, (a_down, b_down))],
        *[(t, (a_later,)) for t in range(25, 45, 5)],
        *[(t, (a_later, b_later)) for t in (45, 50, 60)],
    ]
    for at, ports in story:
        for signal in findings.observe(Snapshot(ports), at):
            change = standing.add if signal.state is RAISED else standing.discard
            change((signal.code, signal.entity))

    assert standing == {("nic.down", "nic:mlx5_0/1"), ("nic.down", "nic:mlx5_1/1")}


def test_a_port_is_expected_by_the_name_that_it_has_now():
    """A driver may name it only after the daemon has started."""
    findings = NicFindings(NicRules(expect=("ibs1/1",)))
    early, named = DOWN, DOWN._replace(name="ibs1/1")
    for at in (0, 10, 20):
        list(findings.observe(Snapshot((early,)), at))
    late = [codes(findings.observe(Snapshot((named,)), at)) for at in (40, 45, 50, 60)]
    back = codes(findings.observe(Snapshot((early,)), 65))

    assert late == [[("nic.gone", None)], [], [("nic.down", Severity.FATAL)], []]
    assert back == [("nic.down", None)]


# --- a restart of the daemon ----------------------------------------------------------------------


def restarted(findings, rules=RULES_OF_ALL):
    return NicFindings(rules, findings.known, findings.seen, findings.bonded)


@pytest.fixture
def before():
    """What a daemon knows that has seen one port up."""
    findings = NicFindings(RULES_OF_ALL)
    list(findings.observe(Snapshot((PORT._replace(nodes=("umad0", "uverbs0")),)), 0))
    return findings


def test_a_port_that_is_gone_before_a_restart_is_missed_after_it(before):
    again = restarted(before)

    assert [codes(again.observe(Snapshot(), t)) for t in (100, 105)] == [[], []]
    assert codes(again.observe(Snapshot(), 110)) == [("nic.gone", Severity.FATAL)]
    assert codes(again.observe(Snapshot((PORT,)), 115)) == [("nic.gone", None)]


def test_a_character_device_that_is_lost_before_a_restart_is_missed_after_it(before):
    again, part = restarted(before), PORT._replace(nodes=("umad0",))

    assert [codes(again.observe(Snapshot((part,)), t)) for t in (100, 105)] == [[], []]
    assert codes(again.observe(Snapshot((part,)), 110)) == [("nic.devices_missing", Severity.FATAL)]


def test_a_port_that_is_out_of_scope_after_a_restart_is_not_missed(before):
    """The default route may lead over another port now, or the operator has excluded it."""
    again = restarted(before)
    found = [codes(again.observe(Snapshot((), (PORT,)), t)) for t in (100, 105, 110, 500)]

    assert found == [[]] * 4
    assert again.known == ()


def ports_of_a_card(prefix):
    """Two, each with a device and an interface of its own."""
    return tuple(
        PORT._replace(
            identity=f"guid{n}/1",
            name=f"{prefix}{n}/1",
            medium=Medium.ROCE,
            interface=f"eth{n}",
            card="0000:3b:00",
            instance=n + 1,
        )
        for n in range(2)
    )


BONDED = {"eth0": "bond0", "eth1": "bond0"}


@pytest.mark.parametrize("name", ["mlx5_bond_0/1", "rocep59s0f0/1"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_a_port_whose_interface_was_bonded_is_not_missed(name, in_scope):
    """The new RDMA device of the bond, with the identity of the first port, stands for both. It may
    have the name of the first device, and the default route may lead over it."""
    first, second = ports_of_a_card("rocep59s0f")
    bond = first._replace(name=name, instance=3)
    findings = NicFindings(RULES_OF_ALL)
    list(findings.observe(Snapshot((first, second)), 0))
    interfaces = tuple(Port(eth, eth, Medium.ETHERNET) for eth in BONDED)
    bonded = Snapshot((bond,) * in_scope, (*interfaces, *(bond,) * (not in_scope)), BONDED)
    again = restarted(findings)
    found = [codes(f.observe(bonded, t)) for f in (findings, again) for t in (5, 10, 15, 100)]

    assert found == [[]] * 8
    assert [port.name for port in again.known] == [name] * in_scope


@pytest.mark.parametrize(
    ("other", "master"),
    [
        (None, "bond0"),  # the RDMA device of the bond itself
        ("0000:5e:00", "bond0"),  # another card in the same bond keeps its own device
        ("0000:3b:00", "br0"),  # the other port of the card is in no bond with it
    ],
)
def test_a_port_that_is_gone_is_missed_although_its_interface_has_a_master(other, master):
    """A bond is new to it, and another port has a new device."""
    lost = PORT._replace(medium=Medium.ROCE, interface="eth0", card="0000:3b:00", instance=1)
    there = PORT._replace(
        identity="guid1/1",
        name="mlx5_1/1",
        medium=Medium.ROCE,
        interface="eth1",
        card=other or "",
        instance=2,
    )
    rest = (there,) if other else ()
    again = (there._replace(instance=3),) if other else ()
    left = Port("eth0", "eth0", Medium.ETHERNET)
    after = Snapshot(again, (left,), {"eth0": "bond0", "eth1": master})
    findings = NicFindings(RULES_OF_ALL)
    list(findings.observe(Snapshot((lost, *rest)), 0))

    assert [codes(findings.observe(after, t)) for t in (5, 10, 15)] == [
        *([], []),
        [("nic.gone", Severity.FATAL)],
    ]


@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("restarts", [True, False])
def test_a_port_is_missed_although_another_one_of_its_card_and_bond_stays(in_scope, restarts):
    """That one has never been up, or is out of scope. Its device is not new."""
    lost, there = ports_of_a_card("mlx5_")
    there = there._replace(up=False)
    inside, outside = ((there,), ()) if in_scope else ((), (there,))
    findings = NicFindings(RULES_OF_ALL)
    list(findings.observe(Snapshot((lost, *inside), outside, BONDED), 0))
    if restarts:
        findings = restarted(findings)
    after = Snapshot(inside, outside, BONDED)
    found = [each for t in (5, 10, 15, 20) for each in codes(findings.observe(after, t))]

    assert found == [("nic.gone", Severity.FATAL)]


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_a_port_of_an_old_bond_is_missed_after_a_reset_of_its_card(restarts, back):
    """Both ports have had devices of their own in it. Only one comes back, or the other comes back
    later and is down."""
    first, second = ports_of_a_card("mlx5_")
    findings = NicFindings(RULES_OF_ALL)
    for at in range(0, 100, 5):
        list(findings.observe(Snapshot((first, second), (), BONDED), at))
    if restarts:
        findings = restarted(findings)
    reset, lost = first._replace(instance=7), second._replace(instance=8, up=False, state="1: DOWN")
    story = [Snapshot((), (), BONDED), Snapshot((reset,), (), BONDED)]
    story += [Snapshot((reset, lost) if back else (reset,), (), BONDED)] * 5
    found = [codes(findings.observe(now, 100 + 5 * n)) for n, now in enumerate(story)]

    code = "nic.down" if back else "nic.gone"
    assert (code, Severity.FATAL) in [each for signals in found for each in signals]


def test_devices_that_come_and_go_do_not_fill_the_memory():
    """Such as those of containers. A port that is missed is remembered longest."""
    port, other = PORT._replace(instance=1, interface="eth0"), PORT._replace(instance=2)
    findings = NicFindings(RULES_OF_ALL)
    list(findings.observe(Snapshot((port,)), 0))
    for number in range(2 * ABSENT):
        passing = other._replace(identity=f"guid{number}/1", name=f"mlx5_{number + 9}/1")
        list(findings.observe(Snapshot((), (passing,)), number + 1))

    assert len(findings.seen) == ABSENT + 2
    assert findings.seen[port.identity].interface == "eth0"


def test_a_port_that_gets_its_guid_late_is_the_same_port():
    """Before, its name was its identity."""
    early, late = PORT._replace(identity=PORT.name), PORT
    findings = NicFindings(RULES_OF_ALL)
    for at in (0, 5):
        list(findings.observe(Snapshot((early,)), at))
    found = [codes(findings.observe(Snapshot((late,)), at)) for at in range(10, 100, 5)]

    assert found == [[]] * 18
    assert [port.identity for port in findings.known] == [late.identity]


def test_a_port_that_leaves_the_scope_ends_its_findings(before):
    for at in (5, 10):
        list(before.observe(Snapshot(), at))

    assert codes(before.observe(Snapshot(), 15)) == [("nic.gone", Severity.FATAL)]
    assert codes(before.observe(Snapshot((), (PORT,)), 20)) == [("nic.gone", None)]


@pytest.mark.parametrize(
    ("code", "expected"), [("", False), ("nic.gone", False), ("nic.down", True), ("nvml.ecc", True)]
)
def test_a_lost_port_that_was_declared_healthy_is_not_missed_after_a_restart(
    before, code, expected
):
    for at in (5, 10, 15):
        list(before.observe(Snapshot(), at))
    before.forget(code)

    assert bool(before.known) is expected


def test_a_lost_port_that_was_declared_healthy_and_comes_back_is_expected_again(before):
    for at in (5, 10, 15):
        list(before.observe(Snapshot(), at))
    before.forget("nic.gone")
    list(before.observe(Snapshot((PORT,)), 20))

    assert [port.name for port in before.known] == [PORT.name]


def test_a_lost_character_device_that_was_declared_healthy_is_not_missed(before):
    part = PORT._replace(nodes=("umad0",))
    for at in (5, 10, 15):
        list(before.observe(Snapshot((part,)), at))
    before.forget("nic.devices_missing")
    list(before.observe(Snapshot((part,)), 20))

    assert [port.nodes for port in before.known] == [("umad0",)]


def test_a_lost_character_device_is_a_finding(see):
    whole = PORT._replace(nodes=("uverbs0", "umad0"))
    part = PORT._replace(nodes=("umad0",))
    see(0, whole)

    assert [see(t, part) for t in (5, 10)] == [[], []]
    assert see(15, part) == [("nic.devices_missing", Severity.FATAL)]
    assert see(20, whole) == [("nic.devices_missing", None)]


def test_renumbered_character_devices_are_no_finding(see):
    """The kernel numbers those of several ports anew that were reset together."""
    before = PORT._replace(nodes=("umad0", "uverbs0"))
    after = PORT._replace(nodes=("umad1", "uverbs1"))
    see(0, before)

    assert [see(t, after) for t in (5, 10, 15, 500)] == [[], [], [], []]


def test_a_character_device_that_is_lost_after_a_renumbering_is_named():
    findings = NicFindings(NicRules())
    story = [("umad0", "uverbs0"), ("umad1", "uverbs1"), *[("umad2",)] * 3]
    found = [
        signal
        for at, nodes in enumerate(story)
        for signal in findings.observe(Snapshot((PORT._replace(nodes=nodes),)), 5.0 * at)
    ]

    assert [s.message for s in found] == ["mlx5_0/1: device uverbs1 is gone"]


def test_a_character_device_of_a_second_port_counts(see):
    """Both ports of a device have the devices of both."""
    see(0, PORT._replace(nodes=("umad0", "umad1", "uverbs0")))
    part = PORT._replace(nodes=("umad2", "uverbs1"))

    assert [see(t, part) for t in (5, 10)] == [[], []]
    assert see(15, part) == [("nic.devices_missing", Severity.FATAL)]


def test_an_unnamed_ethernet_port_is_only_a_warning():
    """The job may not use it; a port that the operator names keeps its severity."""
    up = PORT._replace(name="eth1", identity="eth1", medium=Medium.ETHERNET)
    down = up._replace(up=False)
    stranger, named = NicFindings(NicRules()), NicFindings(NicRules(named=("eth*",)))
    found = []
    for findings in (stranger, named):
        list(findings.observe(Snapshot((up,)), 0))
        list(findings.observe(Snapshot((down,)), 5))
        found.append(codes(findings.observe(Snapshot((down,)), 15)))

    assert found == [[("nic.down", Severity.WARNING)], [("nic.down", Severity.FATAL)]]


def test_a_signal_names_port_identity_and_gpu():
    findings = NicFindings(NicRules())
    near = PORT._replace(near=("pci:0000:3b:00.0",))
    list(findings.observe(Snapshot((near,)), 0))
    list(findings.observe(Snapshot((near._replace(up=False),)), 1))
    (signal,) = findings.observe(Snapshot((near._replace(up=False),)), 20)

    assert signal.entity == "nic:mlx5_0/1"
    assert {"identity guid/1", "pci:0000:3b:00.0"} <= set(signal.evidence)


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "quiet", "loud", "span_s", "severity"),
    [
        ("link_downed", 0, 1, 5, Severity.WARNING),
        ("link_downed", 1, 2, 5, Severity.FATAL),
        ("excessive_buffer_overrun_errors", 0, 1, 5, Severity.DEGRADED),
        ("local_link_integrity_errors", 0, 1, 5, Severity.DEGRADED),
        ("rnr_nak_retry_err", 10, 11, 10, Severity.WARNING),
        ("no_completion_cmds", 0, 1, 5, Severity.DEGRADED),
        ("symbol_error", 100, 101, 10, Severity.WARNING),
        ("symbol_error", 120, 121, 3600, Severity.DEGRADED),
        ("link_error_recovery", 5, 6, 60, Severity.WARNING),
        ("port_rcv_errors", 100, 101, 10, Severity.WARNING),
        ("local_ack_timeout_err", 10, 11, 10, Severity.WARNING),
        ("roce_slow_restart", 100, 101, 10, Severity.WARNING),
        ("port_xmit_discards", 1000, 1001, 10, Severity.WARNING),
        ("rx_drops", 1000, 1001, 10, Severity.WARNING),
        ("cmds_err", 10, 11, 60, Severity.WARNING),
        ("carrier_changes", 2, 3, 5, Severity.WARNING),
    ],
)
def test_each_counter_has_its_limit(counter, quiet, loud, span_s, severity):
    """At the limit nothing of that severity holds, above it does."""
    found = []
    for amount in (quiet, loud):
        history = CounterHistory(quiet_s=600)
        history.observe({counter: 0}, 0.0)
        holds = history.observe({counter: amount}, float(span_s))
        found.append(holds[counter].severity if counter in holds else None)

    assert found[0] is not severity
    assert found[1] is severity


def test_the_first_reading_gives_no_signal(see):
    """A counter shows the past of the port, not the present."""
    assert see(0, counting(link_downed=7, symbol_error=60_000, local_link_integrity_errors=9)) == []


def test_a_counter_clears_after_ten_quiet_minutes(see):
    see(0, counting(local_link_integrity_errors=0))
    raised = see(5, counting(local_link_integrity_errors=1))

    assert raised == [("nic.local_link_integrity_errors", Severity.DEGRADED)]
    assert see(600, counting(local_link_integrity_errors=1)) == []
    assert see(700, counting(local_link_integrity_errors=1)) == [
        ("nic.local_link_integrity_errors", None)
    ]


def test_two_losses_of_the_link_within_ten_minutes_are_fatal(see):
    see(0, counting(link_downed=3))
    one = see(5, counting(link_downed=4))
    far = see(900, counting(link_downed=4))
    again = see(905, counting(link_downed=5))
    near = see(1400, counting(link_downed=6))

    assert one == [("nic.link_downed", Severity.WARNING)]
    assert far == [("nic.link_downed", None)]
    assert again == [("nic.link_downed", Severity.WARNING)]
    assert near == [("nic.link_downed", Severity.FATAL)]


def test_a_counter_reset_is_no_error_and_later_errors_count(see):
    see(0, counting(local_link_integrity_errors=40))

    assert see(5, counting(local_link_integrity_errors=0)) == []
    assert see(10, counting(local_link_integrity_errors=0)) == []
    assert see(15, counting(local_link_integrity_errors=1)) == [
        ("nic.local_link_integrity_errors", Severity.DEGRADED)
    ]


@pytest.mark.parametrize(("counter", "peg"), [("link_downed", 255), ("port_xmit_discards", 65535)])
def test_a_saturated_counter_is_reported(see, counter, peg):
    see(0, counting(**{counter: 0}))
    pegged = see(5, counting(**{counter: peg}))

    assert ("nic.saturated", Severity.INFO) in pegged
    assert ("nic.saturated", None) in see(10, counting(**{counter: 0}))


def test_errors_summed_over_a_long_gap_are_no_burst(see):
    """A daemon that was suspended for an hour sees their sum at once."""
    see(0, counting(port_rcv_errors=0))

    assert see(3600, counting(port_rcv_errors=2000)) == []


def test_a_skipped_reading_is_judged_over_the_longer_time(see):
    see(0, counting(port_rcv_errors=0))
    see(5, counting())

    assert see(100, counting(port_rcv_errors=900)) == []
    assert see(110, counting(port_rcv_errors=1900)) == [("nic.port_rcv_errors", Severity.WARNING)]


def bursts(see, *starts):
    """A second of errors above the limit at each of ``starts``; returns all signals."""
    out, value = see(starts[0] - 1, counting(port_rcv_errors=0)), 0
    for start in starts:
        out += see(start, counting(port_rcv_errors=value))
        value += 500
        out += see(start + 5, counting(port_rcv_errors=value))
    return out


def test_three_bursts_within_an_hour_are_more_than_a_warning(see):
    assert ("nic.errors_repeated", Severity.DEGRADED) in bursts(see, 1000, 2000, 3000)


def test_one_long_burst_is_a_warning(see):
    """Eleven minutes of congestion."""
    out = see(0, counting(port_rcv_errors=0))
    for n in range(1, 133):
        out += see(5 * n, counting(port_rcv_errors=500 * n))

    assert out == [("nic.port_rcv_errors", Severity.WARNING)]


@pytest.mark.parametrize("starts", [(1000, 2000), (1000, 1020, 1040), (1000, 3000, 4800)])
def test_fewer_closer_or_rarer_bursts_are_a_warning(see, starts):
    assert "nic.errors_repeated" not in dict(bursts(see, *starts))


@given(st.lists(st.integers(0, 2**64), min_size=1, max_size=60), st.floats(0.1, 1000))
def test_a_falling_counter_is_never_a_finding(values, step):
    """Resets and invalid values of a driver raise nothing, except that a value is the highest."""
    history = CounterHistory(quiet_s=600)
    for n, value in enumerate(sorted(values, reverse=True)):
        holds = history.observe({"local_link_integrity_errors": value}, n * step)
        assert holds.keys() <= {"saturated"}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=80))
def test_only_raised_findings_clear_and_none_is_raised_twice(story):
    findings, now, raised = NicFindings(NicRules()), 0, set()
    for up, seconds in story:
        now += seconds
        for signal in findings.observe(Snapshot((PORT if up else DOWN,)), now):
            if signal.state is RAISED:
                assert signal.code not in raised
                raised.add(signal.code)
            else:
                raised.remove(signal.code)
