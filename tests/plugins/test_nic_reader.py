"""Reading network ports from trees in the shape of sysfs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.nic.child import ReaderArguments
from tmd_detectors.nic.counters import RULES
from tmd_detectors.nic.judge import KnownPort, NicFindings, NicRules
from tmd_detectors.nic.reader import NicReader, _default_v4, _default_v6, _ib_rate
from tmd_detectors.nic.snapshot import Medium, ScopeReading
from tmd_detectors.nic.topology import nearest

from tests.plugins.sysfs import Tree


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def read(tree, **scope):
    snapshot = NicReader(ScopeReading(**scope), RULES, tree.sys, tree.proc).read()
    return {port.name: port for port in snapshot.ports}


def test_an_infiniband_port_is_read(tree):
    """State, rate, counters of both folders, character device, GUID."""
    tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))

    port = read(tree)["mlx5_0/1"]

    assert (port.medium, port.up, port.rate_mb) == (Medium.INFINIBAND, True, 400_000)
    assert port.counters["link_downed"] == port.counters["rnr_nak_retry_err"] == 0
    assert port.nodes == ("uverbs_mlx5_0",)
    assert port.identity == "b8ce:f603:00a1:0001/1"


@pytest.mark.parametrize(
    ("state", "phys", "up"),
    [
        ("4: ACTIVE", "5: LinkUp", True),
        ("1: DOWN", "2: Polling", False),
        ("1: DOWN", "3: Disabled", False),
        ("2: INIT", "5: LinkUp", None),
        ("3: ARMED", "5: LinkUp", None),
        ("", "", None),
    ],
)
def test_states_of_an_infiniband_port_are_read(tree, state, phys, up):
    """A port that waits for the subnet manager is neither up nor down."""
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    tree.write(f"{port}/state", state)
    tree.write(f"{port}/phys_state", phys)

    assert read(tree)["mlx5_0/1"].up is up


def test_a_roce_port_and_its_interface_are_one(tree):
    device = tree.pci("0000:00/0000:00:01.0")
    tree.rdma("mlx5_0", device, layer="Ethernet")
    tree.interface("ens1", device, carrier_changes=7)

    ports = read(tree)

    assert list(ports) == ["mlx5_0/1"]
    assert ports["mlx5_0/1"].medium is Medium.ROCE
    assert ports["mlx5_0/1"].counters["carrier_changes"] == 7


def test_efa_is_judged_by_its_interface(tree):
    """EFA always reports ACTIVE."""
    device = tree.pci("0000:00/0000:00:06.0", vendor="0x1d0f")
    tree.rdma("rdmap0s6", device, guid="0000:0000:0000:0000", driver="efa")
    tree.interface("ens6", device, operstate="down")
    tree.write("class/infiniband/rdmap0s6/hw_counters/no_completion_cmds", 3)

    port = read(tree)["rdmap0s6/1"]

    assert (port.medium, port.up) == (Medium.EFA, False)
    assert port.counters["no_completion_cmds"] == 3
    assert port.identity == "rdmap0s6/1"


def test_efa_without_an_interface_is_up_while_it_is_there(tree):
    """So its disappearance is a finding."""
    tree.rdma("rdmap0s6", tree.pci("0000:00/0000:00:06.0"), driver="efa")

    port = read(tree)["rdmap0s6/1"]

    assert (port.medium, port.up) == (Medium.EFA, True)


@pytest.mark.parametrize(
    ("operstate", "up"),
    [
        ("up", True),
        ("down", False),
        ("lowerlayerdown", False),
        ("dormant", None),
        ("unknown", None),
    ],
)
def test_states_of_an_ethernet_port_are_read(tree, operstate, up):
    tree.interface("eth1", tree.pci("0000:00/0000:00:01.0"), operstate=operstate, speed=25000)

    port = read(tree)["eth1"]

    assert port.up is up
    assert port.rate_mb == (25000 if up else None)


def test_the_default_route_and_virtual_ports_are_not_watched(tree):
    tree.interface("eth0", tree.pci("0000:00/0000:00:01.0"))
    tree.interface("eth1", tree.pci("0000:00/0000:00:02.0"))
    function = tree.pci("0000:00/0000:00:02.1")
    tree.link(f"{function}/physfn", "../0000:00:02.0")
    tree.interface("eth2", function)
    other = tree.pci("0000:00/0000:00:02.2")
    tree.link(f"{other}/physfn", "../0000:00:02.0")
    tree.rdma("mlx5_9", other)
    tree.interface("docker0")
    tree.default_route("eth0")

    assert list(read(tree)) == ["eth1"]


def test_all_lower_devices_of_the_default_route_are_not_watched(tree):
    """A VLAN on a bond on two ports, one of them a RoCE port."""
    first, second = tree.pci("0000:00/0000:00:01.0"), tree.pci("0000:00/0000:00:02.0")
    tree.interface("eth0", first)
    tree.interface("eth1", second)
    tree.rdma("mlx5_1", second, layer="Ethernet")
    tree.interface("bond0", lower_eth0="", lower_eth1="")
    tree.interface("bond0.7", lower_bond0="")
    tree.default_route("bond0.7")

    assert read(tree) == {}


def test_a_port_named_by_the_operator_is_always_watched(tree):
    tree.interface("eth0", tree.pci("0000:00/0000:00:01.0"))
    tree.interface("eth1", tree.pci("0000:00/0000:00:02.0"))
    tree.interface("veth7")
    tree.default_route("eth0")

    assert list(read(tree, interfaces=("eth0", "veth*"))) == ["eth0", "veth7"]
    assert list(read(tree, interfaces=("*",), exclude=("eth*",))) == ["veth7"]


def test_an_expected_port_is_watched_unless_it_is_excluded(tree):
    """On the default route, or a virtual function; an RDMA port also by its interface."""
    first, second = tree.pci("0000:00/0000:00:01.0"), tree.pci("0000:00/0000:00:02.0")
    tree.interface("eth0", first)
    tree.rdma("mlx5_1", second, layer="Ethernet")
    tree.interface("eth1", second)
    function = tree.pci("0000:00/0000:00:02.1")
    tree.link(f"{function}/physfn", "../0000:00:02.0")
    tree.rdma("mlx5_9", function)
    for interface in ("eth0", "eth1"):
        tree.default_route(interface)

        assert list(read(tree, expect=("eth1", "eth0"))) == ["mlx5_1/1", "eth0"]
        assert "mlx5_1/1" in read(tree, expect=("mlx5_1/1",))
        assert "mlx5_9/1" in read(tree, expect=("mlx5_9/1",))
        assert "eth0" not in read(tree, expect=("eth0",), exclude=("eth0",))
        assert "eth0" in read(tree, expect=("eth0",), interfaces=("mlx5_1/1",))


def test_a_second_interface_of_a_port_may_be_expected(tree):
    """Such as that of another partition of an InfiniBand port."""
    card = tree.pci("0000:00/0000:00:01.0")
    tree.rdma("mlx5_0", card)
    for name in ("ib0", "ib0.8001"):
        tree.interface(name, card)

    assert list(read(tree)) == ["mlx5_0/1"]
    assert list(read(tree, expect=("ib0",))) == ["mlx5_0/1"]
    assert list(read(tree, expect=("ib0.8001",))) == ["mlx5_0/1", "ib0.8001"]


def test_a_virtual_function_that_is_expected_no_longer_is_not_missed(tree):
    function = tree.pci("0000:00/0000:00:02.1")
    tree.link(f"{function}/physfn", "../0000:00:02.0")
    tree.rdma("mlx5_9", function)
    looks = []
    known: tuple[KnownPort, ...] = ()
    for expect in (("mlx5_9/1",), ()):  # the daemon starts again with another configuration
        reader = NicReader(ScopeReading(expect=expect), RULES, tree.sys, tree.proc)
        findings = NicFindings(NicRules(expect=expect), known)
        looks += [list(findings.observe(reader.read(), now)) for now in (0.0, 10.0, 20.0, 30.0)]
        known = findings.known or known

    assert [port.name for port in known] == ["mlx5_9/1"]
    assert looks == [[]] * 8


def test_a_port_of_an_rdma_device_can_be_named_by_its_interface(tree):
    """An operator knows ``ens1``; its counters and state are those of ``mlx5_0/1``."""
    for number in range(2):
        device = tree.pci(f"0000:0{number}/0000:0{number}:01.0")
        tree.rdma(f"mlx5_{number}", device, guid=f"b8ce:f603:00a1:000{number}", layer="Ethernet")
        tree.interface(f"ens{number}", device, carrier_changes=7)
    silent = read(tree, no_counters=("ens0",))

    assert list(read(tree, interfaces=("ens1",))) == ["mlx5_1/1"]
    assert list(read(tree, exclude=("ens1",))) == ["mlx5_0/1"]
    assert silent["mlx5_0/1"].counters == {}
    assert silent["mlx5_1/1"].counters["carrier_changes"] == 7


def test_ports_that_are_there_but_not_watched_are_listed(tree):
    """The default route, a virtual port, an excluded one, and the interface of an RDMA device."""
    first, second = tree.pci("0000:00/0000:00:01.0"), tree.pci("0000:00/0000:00:02.0")
    tree.rdma("mlx5_0", first)
    tree.rdma("mlx5_1", second, layer="Ethernet", guid="b8ce:f603:00a1:0002")
    tree.interface("eth5", second)
    tree.interface("eth0", tree.pci("0000:00/0000:00:03.0"))
    tree.link("class/net/eth0/master", "../bond0")
    tree.interface("dummy0")
    tree.default_route("eth0")
    snapshot = NicReader(ScopeReading(exclude=("mlx5_0/*",)), RULES, tree.sys, tree.proc).read()

    assert [port.name for port in snapshot.ports] == ["mlx5_1/1"]
    outside = {port.identity for port in snapshot.outside}
    assert outside == {"b8ce:f603:00a1:0001/1", "eth0", "eth5", "dummy0"}
    assert (snapshot.ports[0].interface, snapshot.ports[0].card) == ("eth5", "0000:00:02")
    assert snapshot.masters == {"eth0": "bond0"}


def test_an_interface_that_vanishes_while_it_is_read_is_not_out_of_scope(tree):
    """Its name is listed, but leads nowhere any more."""
    tree.link("class/net/eth1", "../../devices/gone/net/eth1")
    snapshot = NicReader(ScopeReading(), RULES, tree.sys, tree.proc).read()

    assert (snapshot.ports, snapshot.outside) == ((), ())


def test_a_port_stays_in_or_out_of_scope_by_its_interface_when_that_has_vanished(tree):
    """Both ports lose theirs, as into the network of a container. A new reader gets the names. At
    last other interfaces have the names, so that only those are named."""
    scope = ScopeReading(interfaces=("eth0", "eth1"), exclude=("eth1",))
    for number in range(2):
        tree.roce(number)
    reader = NicReader(scope, RULES, tree.sys, tree.proc)
    before = reader.read()
    for number in range(2):
        tree.move_interface_away(number)
    last = {port.identity: port.interface for port in (*before.ports, *before.outside)}
    again = NicReader(scope, RULES, tree.sys, tree.proc, interfaces=last)
    found = [before, reader.read(), again.read()]
    for number in range(2):
        card = tree.pci(f"0000:1{number}/0000:1{number}:01.0")
        tree.interface(f"eth{number}", card)
    found.append(again.read())

    ports = [[(port.name, port.interface) for port in snapshot.ports] for snapshot in found]
    assert ports == [[("mlx5_0/1", "eth0")]] * 3 + [[("eth0", "")]]
    assert ["carrier_changes" in s.ports[0].counters for s in found] == [True, False, False, True]


def test_an_excluded_port_stays_so_while_another_interface_has_the_name_of_its_own(tree):
    """Also for a new reader. Its own has moved into the network of a container."""
    scope = ScopeReading(exclude=("eth1",))
    tree.roce(1)
    reader = NicReader(scope, RULES, tree.sys, tree.proc)
    (port,) = [port for port in reader.read().outside if port.instance]
    tree.move_interface_away(1)
    tree.interface("eth1", tree.pci("0000:11/0000:11:01.0"))
    again = NicReader(scope, RULES, tree.sys, tree.proc, interfaces={port.identity: "eth1"})

    assert [each.read().ports for each in (reader, again)] == [(), ()]


def test_a_port_does_not_get_the_interface_of_the_other_port_of_its_device(tree):
    """The one of port 2 moves into the network of a container; that of port 1 is left alone."""
    card = tree.pci("0000:01/0000:01:01.0")
    tree.rdma("mlx4_0", card, layer="Ethernet", driver="mlx4_core")
    tree.write("class/infiniband/mlx4_0/ports/2/state", "4: ACTIVE")
    for number in range(2):
        tree.interface(f"eth{number}", card, dev_port=number)
    reader = NicReader(ScopeReading(exclude=("eth1",)), RULES, tree.sys, tree.proc)
    found = [reader.read()]
    for folder in ("class/net/eth1", f"{card}/net/eth1"):
        tree.remove(folder)
    found.append(reader.read())

    assert [[(p.name, p.interface) for p in s.ports] for s in found] == [[("mlx4_0/1", "eth0")]] * 2


def test_a_file_that_returned_einval_is_never_read_again(tree):
    """The real EINVAL of a real sysfs file; then the file is skipped."""
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    place = tree.sys / port / "counters/port_rcv_errors"
    place.unlink()
    place.symlink_to("/sys/class/net/lo/speed")
    reader = NicReader(ScopeReading(), RULES, tree.sys, tree.proc)

    first = reader.read().ports[0].counters
    place.unlink()
    place.write_text("5")
    second = reader.read().ports[0].counters

    assert "port_rcv_errors" not in first
    assert reader.refused == {str(place)}
    assert "port_rcv_errors" not in second


def test_the_reading_of_counters_can_be_disabled(tree):
    tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))

    assert read(tree, no_counters=("mlx5_*",))["mlx5_0/1"].counters == {}


def test_a_counter_without_a_number_is_ignored(tree):
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    tree.write(f"{port}/counters/symbol_error", "N/A (no PMA)")

    assert "symbol_error" not in read(tree)["mlx5_0/1"].counters


def test_the_nearest_gpus_are_those_below_the_same_switch(tree):
    tree.gpu("0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0")
    tree.gpu("0000:00/0000:00:05.0/0000:05:00.0")
    tree.gpu("0000:80/0000:80:01.0")
    tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0"))
    tree.rdma("mlx5_1", tree.pci("0000:c0/0000:c0:01.0"))

    ports = read(tree)

    assert ports["mlx5_0/1"].near == ("pci:0000:02:00.0",)
    assert ports["mlx5_1/1"].near == ()


@given(st.lists(st.sampled_from(["01", "02", "03"]), max_size=5), st.text(max_size=8))
def test_a_gpu_on_the_path_itself_is_nearest(parts, other):
    device = "/sys/devices/pci0000:00/" + "/".join(parts)

    assert "here" in nearest(device, {"here": device, "other": f"/sys/devices/{other}"})


@given(st.text())
def test_no_text_of_the_kernel_breaks_a_parser(text):
    """Hostile input yields nothing, never an exception."""
    for parse in (_default_v4, _default_v6):
        assert all(isinstance(name, str) for name in parse(text))
    assert _ib_rate(text) is None or text.partition(" ")[2].startswith("Gb/sec")


def test_ipv6_default_routes_are_parsed():
    zeros = "0" * 32
    lines = [
        f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 1 0 00000003     eth0",
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 1 0 00200200       lo",
        f"fe80{'0' * 28} 40 {zeros} 00 {zeros} 00000100 1 0 00000001     eth1",
    ]

    assert list(_default_v6("\n".join(lines))) == ["eth0"]


def test_an_empty_host_has_no_ports(tmp_path):
    reader = NicReader(ScopeReading(), RULES, tmp_path / "none", tmp_path / "none")

    assert reader.read().ports == ()


def test_a_default_route_that_moves_changes_no_port_in_scope(tree):
    """Otherwise the port it moves to would seem gone."""
    tree.interface("eth0", tree.pci("0000:00/0000:00:01.0"))
    tree.interface("eth1", tree.pci("0000:00/0000:00:02.0"))
    tree.default_route("eth0")
    reader = NicReader(ScopeReading(), RULES, tree.sys, tree.proc)
    before = [port.name for port in reader.read().ports]
    tree.default_route("eth1")
    after = [port.name for port in reader.read().ports]

    assert before == after == ["eth1"]


@pytest.mark.parametrize("restarts", [False, True])
def test_devices_that_swap_their_names_keep_their_scope(tree, restarts):
    """The port of the default route stays unwatched under the name of the other one."""
    for number in range(2):
        tree.roce(number)
    tree.default_route("eth0")
    request = ReaderArguments(ScopeReading(), tuple(RULES), str(tree.sys), str(tree.proc))
    reader = NicReader(*request)
    before = reader.read()
    guids = [f"class/infiniband/mlx5_{number}/node_guid" for number in range(2)]
    texts = [(tree.sys / guid).read_text() for guid in guids]
    for guid, text in zip(guids, reversed(texts), strict=True):
        tree.write(guid, text)
    tree.default_route("eth1")
    if restarts:
        reader = NicReader(*request.after(before))
    after = reader.read()

    assert [port.name for port in before.ports] == ["mlx5_1/1"]
    assert [port.name for port in after.ports] == ["mlx5_0/1"]
    assert [port.identity for port in before.ports] == [port.identity for port in after.ports]
