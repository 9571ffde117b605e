"""The complete detector: on trees in the shape of sysfs, and on real interfaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, aclosing

import pytest
from tmd_detectors.kept import recall
from tmd_detectors.nic.child import ReaderArguments
from tmd_detectors.nic.detector import NicConfig, NicDetector
from tmd_detectors.nic.judge import NicRules
from tmd_detectors.nic.memory import NicMemory, RememberedPorts
from tmd_detectors.nic.probe import NicProbe
from tmd_detectors.nic.snapshot import ABSENT, Medium, Port, ScopeReading, Snapshot

from tests.plugins.sysfs import Tree
from tmd.plugin import Severity, State, boot_id
from tmd.testing import FakeContext
from tmd.testing.clients import until

ALONE = """
import asyncio, json, sys
from contextlib import aclosing
from pathlib import Path
from tmd_detectors.nic.detector import NicConfig, NicDetector

class Context:
    host, sleep, state_dir = "h1", staticmethod(asyncio.sleep), Path(sys.argv[1])
    config = NicConfig(
        poll_s=0.05, interfaces=("veth_a",), expect=("veth_a",), down_hold_s=0.2
    )
    now = staticmethod(lambda: asyncio.get_running_loop().time())
    looked = staticmethod(lambda: None)

async def main():
    async with aclosing(NicDetector().watch(Context())) as signals:
        async for s in signals:
            print(json.dumps([s.code, s.entity, s.severity, s.state]), flush=True)

asyncio.run(main())
"""


def made(state_dir, **config):
    return FakeContext(NicConfig(**config), "h1", state_dir)


def one_port(tmp_path):
    """A tree with one port that is up; its context, the tree and the port's folder."""
    tree = Tree(tmp_path)
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    roots = {"sys_root": str(tree.sys), "proc_root": str(tree.proc)}
    return made(tmp_path, poll_s=0.02, down_hold_s=0.05, **roots), tree, port


async def test_a_port_of_a_tree_goes_down_and_comes_back(tmp_path):
    """Reader, its process, judge and signals together."""
    context, tree, port = one_port(tmp_path)
    polls = asyncio.Queue()
    context.sleep = lambda seconds: _counted(polls, seconds)
    async with aclosing(NicDetector().watch(context)) as signals:
        first = asyncio.create_task(anext(signals))
        await polls.get()  # it was observed up
        tree.write(f"{port}/state", "1: DOWN")
        down = await first
        tree.write(f"{port}/state", "4: ACTIVE")
        back = await anext(signals)

    assert (down.code, down.entity, down.severity) == ("nic.down", "nic:mlx5_0/1", Severity.FATAL)
    assert (back.code, back.state) == ("nic.down", State.CLEARED)


def remembers(file):
    """Whether a daemon that starts now knows of a port that has been up."""
    return bool(recall(file, NicMemory, boot_id()).ports)


async def up_and_then_down(tmp_path, detector):
    """A tree with a port that the detector has seen up, and that is down now; its context."""
    context, tree, port = one_port(tmp_path)
    async with aclosing(detector.watch(context)) as signals:
        first = asyncio.create_task(anext(signals))
        await until(lambda: (tmp_path / "ports.json").exists())
        tree.write(f"{port}/state", "1: DOWN")
        assert (await first).code == "nic.down"
    return context, tree, port


async def test_a_port_that_is_down_when_the_daemon_restarts_stays_a_finding(tmp_path):
    context, _, _ = await up_and_then_down(tmp_path, NicDetector())
    async with aclosing(NicDetector().watch(context)) as signals:
        again = await anext(signals)

    assert (again.code, again.severity, again.state) == ("nic.down", Severity.FATAL, State.RAISED)


async def test_a_port_that_is_gone_when_the_daemon_restarts_stays_a_finding(tmp_path):
    """A card that has fallen off the bus shows nothing that a new daemon could look at."""
    context, tree, _ = one_port(tmp_path)
    async with aclosing(NicDetector().watch(context)) as signals:
        first = asyncio.create_task(anext(signals))
        await until(lambda: (tmp_path / "ports.json").exists())
        shutil.rmtree(tree.sys / "class/infiniband/mlx5_0")
        before = await first
    async with aclosing(NicDetector().watch(context)) as signals:
        after = await anext(signals)

    assert (before.code, before.severity) == ("nic.gone", Severity.FATAL)
    assert (after.code, after.entity, after.severity) == (
        before.code,
        before.entity,
        before.severity,
    )


@pytest.mark.parametrize("why", ["declared healthy", "a new boot", "half a file"])
async def test_a_port_that_is_no_longer_expected_is_no_finding(tmp_path, why):
    """It is down when the daemon starts. Once it has been up, a loss of its link counts again."""
    detector = NicDetector()
    file = tmp_path / "ports.json"
    context, tree, port = await up_and_then_down(tmp_path, detector)
    async with aclosing(detector.watch(context)) as signals:
        assert (await anext(signals)).code == "nic.down"
        if why == "declared healthy":
            detector.declared_healthy("nic.down")
            rest = asyncio.create_task(anext(signals))
            await until(lambda: not remembers(file))
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
    if why == "a new boot":
        file.write_text(file.read_text().replace(boot_id(), "another"))
    elif why == "half a file":
        file.write_bytes(b"{half")
    polls = asyncio.Queue()
    context.sleep = lambda seconds: _counted(polls, seconds)
    async with aclosing(NicDetector().watch(context)) as signals:
        first = asyncio.create_task(anext(signals))
        for _ in range(10):  # far beyond down_hold_s
            await polls.get()
        quiet = not first.done()
        tree.write(f"{port}/state", "4: ACTIVE")
        await until(lambda: remembers(file))
        tree.write(f"{port}/state", "1: DOWN")
        lost = await first

    assert quiet
    assert (lost.code, lost.state) == ("nic.down", State.RAISED)


async def test_a_memory_that_cannot_be_written_is_reported(tmp_path):
    context, _, _ = one_port(tmp_path)
    nowhere = tmp_path / "nowhere"
    context = FakeContext(context.config, "h1", nowhere)
    async with aclosing(NicDetector().watch(context)) as signals:
        raised = await anext(signals)
        nowhere.mkdir()
        cleared = await anext(signals)

    assert (raised.code, raised.state) == ("nic.ports_not_kept", State.RAISED)
    assert str(nowhere / "ports.json") in raised.message
    assert (cleared.code, cleared.state) == ("nic.ports_not_kept", State.CLEARED)


async def _counted(polls, seconds):
    polls.put_nowait(seconds)
    await asyncio.sleep(seconds)


async def test_a_hanging_reader_is_reported_and_abandoned(tmp_path):
    """A FIFO without a writer blocks the reading process as a wedged driver would."""
    tree = Tree(tmp_path)
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    place = tree.sys / port / "state"
    place.unlink()
    os.mkfifo(place)
    request = ReaderArguments(ScopeReading(), (), str(tree.sys), str(tree.proc))
    probe = NicProbe(request)
    try:
        hung = await probe.read(timeout_s=0.5)
        place.unlink()
        place.write_text("4: ACTIVE\n")
        well = await probe.read(timeout_s=60)
    finally:
        await probe.close()

    assert hung is None
    assert well is not None
    assert [p.up for p in well.ports] == [True]


async def read_by_two_processes(request, change):
    """What the first one reads, and after ``change`` the second one."""
    probe = NicProbe(request)
    try:
        before = await probe.read(timeout_s=60)
        change()
        await probe.close()
        after = await probe.read(timeout_s=60)
    finally:
        await probe.close()
    assert before is not None
    assert after is not None
    return before, after


@pytest.mark.parametrize("scope", [{"interfaces": ("eth0",)}, {"exclude": ("eth1",)}])
async def test_a_new_reading_process_goes_on_with_what_the_last_one_knew(tmp_path, scope):
    """The interfaces of both ports have moved into the network of a container meanwhile."""
    tree = Tree(tmp_path)
    for number in range(2):
        tree.roce(number)

    def move_both() -> None:
        for number in range(2):
            tree.move_interface_away(number)

    request = ReaderArguments(ScopeReading(**scope), (), str(tree.sys), str(tree.proc))
    before, after = await read_by_two_processes(request, move_both)

    assert [p.name for p in before.ports] == [p.name for p in after.ports] == ["mlx5_0/1"]


def test_the_interfaces_of_devices_that_are_away_are_passed_on_within_a_limit():
    """A card may be absent while the reading process is replaced. Devices of containers come and
    go, and an argument of a process must stay short."""
    request = ReaderArguments(ScopeReading(), ())
    there = Port("mlx5_0/1", "guid/1", Medium.ROCE, interface="eth0", instance=1)
    known = request.after(Snapshot((there,)))
    for number in range(2 * ABSENT):
        passing = Port("mlx5_9/1", f"guid{number}/1", Medium.ROCE, interface=f"sf{number}")
        known = known.after(Snapshot((there,), (passing,)))
    without = known.after(Snapshot())

    assert len(known.interfaces) == ABSENT + 2
    assert without.interfaces["guid/1"] == "eth0"
    assert len(without.interfaces) == ABSENT


def test_what_is_seen_later_is_saved_as_well(tmp_path):
    file = tmp_path / "ports.json"
    ports = RememberedPorts(NicRules(), file)
    seen = []
    for number in (1, 2):
        port = Port(f"mlx5_{number}/1", f"guid{number}/1", Medium.ROCE, instance=number)
        assert list(ports.observe(Snapshot(outside=(port,)), float(number))) == []
        seen.append(set(recall(file, NicMemory, boot_id()).seen))

    assert seen == [{"guid1/1"}, {"guid1/1", "guid2/1"}]


async def test_a_port_stays_in_scope_in_a_new_reading_process_if_the_route_moves(tmp_path):
    """It would seem gone. Names of virtual ports, of which there may be many, are not passed on."""
    tree = Tree(tmp_path)
    for number in range(2):
        tree.interface(f"eth{number}", tree.pci(f"0000:0{number}/0000:0{number}:01.0"))
    tree.interface("veth7")
    tree.default_route("eth0")
    request = ReaderArguments(ScopeReading(), (), str(tree.sys), str(tree.proc))
    before, after = await read_by_two_processes(request, lambda: tree.default_route("eth1"))

    assert [p.name for p in before.ports] == ["eth1"]
    assert "eth1" in [p.name for p in after.ports]
    assert request.after(before).in_scope == ("eth1",)


async def test_an_excluded_port_stays_so_over_a_restart_of_the_daemon(tmp_path):
    """Its interface, by which it is excluded, has moved into the network of a container."""
    tree = Tree(tmp_path)
    port = tree.roce(1)
    roots = {"sys_root": str(tree.sys), "proc_root": str(tree.proc)}
    context = made(tmp_path, poll_s=0.01, down_hold_s=0.0, exclude=("eth1",), **roots)
    polls = asyncio.Queue()
    setattr(context, "sleep", lambda seconds: _counted(polls, seconds))  # noqa: B010
    for states in (["4: ACTIVE"], ["4: ACTIVE", "1: DOWN"]):
        async with aclosing(NicDetector().watch(context)) as signals:
            first = asyncio.create_task(anext(signals))
            for state in states:
                tree.write(f"{port}/state", state)
                for _ in range(10):
                    await polls.get()
            quiet = not first.done()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        assert quiet
        if states == ["4: ACTIVE"]:
            tree.move_interface_away(1)


async def test_two_hung_readings_are_a_finding_about_the_reading(tmp_path):
    tree = Tree(tmp_path)
    port = tree.rdma("mlx5_0", tree.pci("0000:00/0000:00:01.0"))
    place = tree.sys / port / "state"
    place.unlink()
    os.mkfifo(place)
    roots = {"sys_root": str(tree.sys), "proc_root": str(tree.proc)}
    context = made(tmp_path, poll_s=0.01, **roots)
    async with aclosing(NicDetector(patience_s=0.3).watch(context)) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.entity) == ("nic.unreadable", "host")
    assert signal.severity is Severity.WARNING


async def test_hanging_readings_do_not_slow_down_the_polls_without_bound(tmp_path):
    """If the pause doubled up to 256 polls, a port that is down would be reported 20 min late."""
    context = made(tmp_path, poll_s=5.0, sys_root=str(tmp_path), proc_root=str(tmp_path))
    pauses = []
    enough = asyncio.Event()

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 8:
            enough.set()
            await asyncio.Event().wait()

    context.sleep = sleep
    async with aclosing(NicDetector(patience_s=0.0).watch(context)) as signals:
        raised = await anext(signals)
        rest = asyncio.create_task(anext(signals))
        await enough.wait()
        rest.cancel()
        await asyncio.gather(rest, return_exceptions=True)

    assert raised.code == "nic.unreadable"
    assert pauses == [10.0, 20.0, *[40.0] * 6]


@pytest.fixture
def namespace():
    """A network namespace with a pair of real interfaces, both up. Removed at the end."""
    name = f"tmd{os.urandom(3).hex()}"
    with ExitStack() as stack:

        def ip(*words):
            subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

        try:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "add", "veth_a", "type", "veth", "peer", "name", "veth_b")
            for end in ("veth_a", "veth_b"):
                ip("-n", name, "link", "set", end, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            if os.environ.get("CI"):
                pytest.fail(f"no network namespace with a veth pair: {why!r}")
            pytest.skip(f"no network namespace with a veth pair (needs root): {why!r}")
        yield name


def test_a_real_link_that_goes_down_and_up_is_reported(namespace, tmp_path):
    """The other end is set down; the detector runs in the namespace and reads the real /sys."""
    script = [sys.executable, "-u", "-c", ALONE, str(tmp_path)]
    command = ["ip", "netns", "exec", namespace, *script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            _set(namespace, "veth_b", "down")
            down = json.loads(child.stdout.readline())
            _set(namespace, "veth_b", "up")
            heard = [json.loads(child.stdout.readline())]
        finally:
            child.terminate()

    assert down == ["nic.down", "nic:veth_a", "fatal", "raised"]
    assert heard == [["nic.down", "nic:veth_a", "fatal", "cleared"]]


def _set(namespace, interface, state):
    command = ["ip", "-n", namespace, "link", "set", interface, state]
    subprocess.run(command, check=True, timeout=20)
