"""The Unix socket, with real connections."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import tempfile
from contextlib import asynccontextmanager

import msgspec
import pytest
from msgspec import structs
from tmd_detectors.trainer import NAN_LOSS, TrainerConfig, TrainerFindings

from tests.values import failover
from tmd import wire
from tmd.core.planning.directives import Leave, Train
from tmd.core.values.errors import ConfigError, WireError
from tmd.core.values.model import (
    Activity,
    Exit,
    HostStatus,
    Member,
    Membership,
    Rehearsal,
    ShadowStatus,
)
from tmd.core.values.pace import Pace
from tmd.daemon import lifelines
from tmd.daemon.agent_socket import AgentSocket, bind, uids_of
from tmd.daemon.agents import FIRST_PROTOCOL, STARTED_AGAIN, AgentServer
from tmd.daemon.fd_passing import AgentListener
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.testing.clients import FakeLauncher, FakeTrainer, connected, until, worker_status

WITHIN_S = 5
ONE, TWO = "h1/job/0.a", "h2/job/0.a"


class Host:
    """A served socket and the objects that the server writes to."""

    def __init__(self, folder, **more):
        self.path = folder / "run" / "tmd.sock"
        self.roster = Roster()
        self.records = Records(folder)
        door = AgentSocket(
            path=self.path,
            host="h1",
            uids=uids_of(()),
            key_of=lambda job: job.encode().ljust(32, b"k"),
            **more,
        )
        self.server = AgentServer(door, self.roster, self.records)

    @asynccontextmanager
    async def serving(self):
        self.task = task = asyncio.create_task(self.server.serve())
        await asyncio.wait(
            [task, waiting := asyncio.create_task(self.server.listening.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiting.cancel()
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def obey(self, record):
        self.records.take(record)
        self.server.push()


@pytest.fixture
async def host(tmp_path):
    async with Host(tmp_path).serving() as host:
        yield host


@asynccontextmanager
async def trainer(host, worker=ONE):
    async with connected(host.path) as connection:
        yield FakeTrainer(connection, worker_status(worker))


async def rejected(connection):
    async with asyncio.timeout(5):
        answer = await connection.receive()
        assert isinstance(answer, wire.Rejected)
        with pytest.raises(asyncio.IncompleteReadError):
            await connection.receive()
    return answer.reason


async def test_a_trainer_is_welcomed_with_the_key_of_its_job(host):
    """One that does not state the version of its protocol is of 0.1.0."""
    async with trainer(host) as one:
        welcome = await one.hello()

        assert (welcome.host, welcome.key[:4], len(welcome.key)) == ("h1", b"jobk", 32)
        assert host.roster.statuses == (structs.replace(one.status, protocol=FIRST_PROTOCOL),)


async def test_an_order_is_sent_only_when_the_directive_changes(host, record):
    async with trainer(host) as one:
        await one.hello()
        host.obey(record(revision=1, lease_epoch=5))
        directive = await one.directive(lambda d: isinstance(d, Train))
        host.obey(record(revision=2, lease_epoch=6))
        host.obey(record(revision=3, lease_epoch=6, membership=record().membership.replaced({}, 2)))
        await one.directive(lambda d: d != directive)

        assert [o.revision for o in one.orders] == [1, 3]


async def test_the_directive_is_sent_again_after_a_reconnect(host, record):
    host.obey(record())
    for _ in range(2):
        async with trainer(host) as one:
            await one.hello()
            assert isinstance(await one.directive(lambda _: True), Train)


async def test_a_closed_connection_is_not_an_exit(host):
    async with trainer(host) as one:
        await one.hello()
    await until(lambda: not host.roster.workers[ONE].connected)

    assert host.roster.statuses
    assert not host.roster.exits


async def test_a_new_connection_of_a_worker_replaces_the_old_one(host, record):
    async with trainer(host) as old, trainer(host) as new:
        await old.hello()
        await new.hello()
        host.obey(record())
        await new.directive(lambda d: isinstance(d, Train))
        await until(lambda: host.roster.workers[ONE].connected)

        assert old.orders == []


async def test_reports_reach_the_roster(host):
    async with trainer(host) as one:
        await one.hello()
        await one.say(activity=Activity.TRAINING, step=7)
        await until(lambda: host.roster.statuses[0].step == 7)

        assert host.roster.statuses[0].activity is Activity.TRAINING


UNENCODABLE = {
    "loss": math.nan,
    "step_seconds": math.nan,
    "stands_s": -math.inf,
    "pace": Pace(3, math.nan),
    "detail": "x" * 5000,
    "shadow": ShadowStatus(1, lag_s=math.nan),
    "rehearsed": (Rehearsal(3, math.inf),),
    "timings": {"copy": math.inf, "transfer": 1.0},
}


async def test_what_is_no_number_leaves_the_status_of_the_host_readable(host):
    """Nor does a text without end spoil it, and no worker is refused for either."""
    gone = "h1/job/1.b"
    async with trainer(host) as one, connected(host.path) as connection:
        await one.hello()
        await one.say(**UNENCODABLE)
        launcher = FakeLauncher(connection, "job", (gone,))
        await launcher.hello()
        await connection.send(wire.Exited(Exit(gone, "job", 0, math.nan)))
        await until(lambda: bool(host.roster.exits and host.roster.statuses[0].shadow))
        status = HostStatus("h1", "boot", workers=host.roster.statuses, exits=(*host.roster.exits,))
        read = msgspec.json.decode(msgspec.json.encode(status), type=HostStatus)

    assert read == status
    (known,) = read.workers
    assert (known.pace, known.loss, known.timings) == (None, None, {"transfer": 1.0})
    assert (known.stands_s, known.step_seconds, len(known.detail)) == (0.0, 0.0, 1000)
    assert read.exits[0].at > 0


async def test_a_loss_that_is_no_number_is_found(host):
    """Although the status of the host cannot hold it."""
    findings, feed = TrainerFindings(TrainerConfig()), host.roster.subscribe(0.0)
    async with trainer(host) as one:
        await one.hello()
        await one.say(loss=math.nan, step=7)
        await until(lambda: host.roster.statuses[0].step == 7)
        host.roster.repeat(1.0)
        found = [signal.code for signal in findings.observe(await feed.take(), 1.0)]

        assert found == [NAN_LOSS]
        assert host.roster.statuses[0].loss is None


async def test_exits_reach_the_roster(host):
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        await launcher.exited(ONE, -9)
        await until(lambda: bool(host.roster.exits))

    assert host.roster.exits[0].code == -9


async def test_a_launcher_that_ends_leaves_its_exits_on_the_disk(tmp_path):
    """Once the daemon has closed the connection: nobody else knows them then."""
    kept = []
    served = Host(tmp_path)
    served.server._keep = lambda: kept.append([e.code for e in served.roster.exits])
    async with served.serving(), connected(served.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        await launcher.exited(ONE, 3)
        connection.end()
        with pytest.raises(asyncio.IncompleteReadError):
            await connection.receive()

        assert kept == [[3]]


async def test_an_exit_that_has_arrived_is_taken_in_by_a_daemon_that_stops(tmp_path):
    kept = []
    served = Host(tmp_path)
    served.server._keep = lambda: kept.append([e.code for e in served.roster.exits])
    async with served.serving(), connected(served.path) as connection:
        await FakeLauncher(connection, "job", (ONE,)).hello()
        await until(lambda: bool(served.server._launchers))
        (streams,) = served.server._clients.values()
        served.task.cancel()  # it stops in the next turn of the loop, before it reads this:
        streams.reader.feed_data(wire.encode(wire.Exited(Exit(ONE, "job", 3, at=0.0))))
        with pytest.raises(asyncio.IncompleteReadError):
            await connection.receive()

    assert kept == [[3]]


def failed(record, *dead):
    plan = failover(record, *dead)
    return structs.replace(record, plan=plan, revision=record.revision + 1)


async def test_a_worker_named_dead_is_killed_by_its_launcher(host, record):
    """It hangs, so it cannot obey its own order to leave."""
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE, "h1/job/1.a"))
        await launcher.hello()
        host.obey(failed(record(), ONE, TWO))
        kill = await launcher.next_kill()

        assert kill.worker == ONE
        assert "silent" in kill.reason


async def test_a_late_launcher_is_asked_to_kill_only_live_workers(host, record):
    host.obey(failed(record(), ONE, "h1/job/1.a"))
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        assert (await launcher.next_kill()).worker == ONE
        await launcher.exited(ONE, -9)
        await FakeLauncher(connection, "job", (ONE, "h1/job/1.a")).hello()

        assert (await launcher.next_kill()).worker == "h1/job/1.a"


async def test_a_trainer_named_dead_is_ordered_to_leave(host, record):
    async with trainer(host) as one:
        await one.hello()
        host.obey(failed(record(), ONE))

        assert isinstance(await one.directive(lambda d: isinstance(d, Leave)), Leave)


TRAINER = """
import socket, sys, time
from msgspec import structs
from tmd import wire
from tmd.core.values.model import Activity
from tmd.testing.clients import worker_status
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    rank = None if sys.argv[2] == "standby" else 0
    status = structs.replace(worker_status("h1/job/0.a", activity=Activity(sys.argv[2])), rank=rank)
    s.sendall(wire.encode(wire.TrainerHello(wire.VERSION, status, 0)))
    time.sleep(60)
"""


async def python_ended(host, activity="training"):
    """Let the process of a worker begin and end; its launcher does not report it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TRAINER, str(host.path), activity)
    )
    try:
        await until(lambda: bool(host.roster.statuses), within_s=10)
    finally:
        process.kill()
        await process.wait()
    await until(lambda: ONE in host.server._lifelines._graces, within_s=10)


@pytest.mark.parametrize(
    ("activity", "reported", "code"),
    [("training", None, lifelines.UNKNOWN), ("left", None, 0), ("training", -9, -9)],
    ids=["nobody knows how", "it had left", "its launcher knows"],
)
async def test_the_exit_of_a_process_is_detected(host, activity, reported, code):
    """Even if its launcher was killed with it. A launcher's report takes precedence."""
    await python_ended(host, activity)
    async with connected(host.path) as connection:
        if reported is not None:
            await FakeLauncher(connection, "job", (ONE,)).hello()
            await FakeLauncher(connection, "job", (ONE,)).exited(ONE, reported)
        await until(lambda: bool(host.roster.exits), within_s=10)

    assert [e.code for e in host.roster.exits] == [code]
    assert host.roster.statuses == ()


async def test_a_launcher_that_is_connected_is_waited_for(host):
    """Its command may be a shell script that goes on after Python, as with an upload. A guess would
    make a failure of a job that has ended well."""
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        await python_ended(host)
        graces = host.server._lifelines._graces
        first = graces[ONE]
        await until(lambda: graces.get(ONE) is not first, within_s=10)
        before = list(host.roster.exits)
        await launcher.exited(ONE, 0)
        await until(lambda: bool(host.roster.exits), within_s=10)

    assert before == []
    assert [e.code for e in host.roster.exits] == [0]


async def test_no_launcher_is_waited_for_in_a_recovery(host, record):
    """Python may have ended by ``sys.exit(1)`` while other ranks train, and they wait for it."""
    async with connected(host.path) as connection:
        await FakeLauncher(connection, "job", (ONE,)).hello()
        await python_ended(host)
        recovers = failed(record(), TWO)
        host.obey(structs.replace(recovers, plan=structs.replace(recovers.plan, dead=())))
        await until(lambda: host.roster.ended(ONE), within_s=10)

    assert [e.code for e in host.roster.exits] == [lifelines.UNKNOWN]


async def test_a_worker_without_a_rank_is_gone_with_its_python(host):
    """Plans count on standbys, and a job is formed of workers that start."""
    async with connected(host.path) as connection:
        await FakeLauncher(connection, "job", (ONE,)).hello()
        await python_ended(host, "standby")
        await until(lambda: host.roster.ended(ONE), within_s=10)

    assert host.roster.statuses == ()


@pytest.mark.parametrize("activity", ["training", "standby"])
async def test_python_that_a_shell_script_starts_again_is_no_longer_the_worker(
    host, record, activity
):
    """It has nothing of the state, and would never come to the step that the others wait in. The
    launcher ends the script, and so can start a worker instead."""
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        await python_ended(host, activity)
        for _ in range(2):  # the script tries again
            async with connected(host.path) as again:
                await again.send(wire.TrainerHello(wire.VERSION, worker_status(ONE), 0))

                assert "has started Python again" in await rejected(again)
        kill = await launcher.next_kill()
        await launcher.exited(ONE, -9)
        await until(lambda: not host.roster.returned)
        host.server.push()
        await launcher.hello()
        host.obey(failed(record(), "h1/job/1.a"))
        await FakeLauncher(connection, "job", (ONE, "h1/job/1.a")).hello()

        assert (kill.worker, kill.reason) == (ONE, STARTED_AGAIN)
        assert (await launcher.next_kill()).worker == "h1/job/1.a"
    assert [e.code for e in host.roster.exits] == [lifelines.UNKNOWN]
    assert host.roster.statuses == ()


ENDING = """
import socket, sys, threading
from tmd import wire
from tmd.robust_futex import ExitBeacon
from tmd.testing.clients import worker_status
class Brief(ExitBeacon):
    def _live(self):
        ends.wait()
ends = threading.Event()
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    held = Brief()
    hello = wire.TrainerHello(wire.VERSION, worker_status("h1/job/0.a"), 0, held.thread)
    socket.send_fds(s, [wire.encode(hello)], [held.fd])
    sys.stdin.readline()
    ends.set()
    sys.stdin.readline()
"""


async def test_a_process_that_begins_to_exit_is_detected(host):
    """This process first does what a killed process does last."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ENDING, str(host.path)), stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        await until(lambda: bool(host.roster.statuses), within_s=10)
        process.stdin.write(b"end\n")
        await until(lambda: bool(host.roster.exits), within_s=10)
        lives = process.returncode is None
        first = host.roster.exits[0]
    finally:
        process.kill()
        await process.wait()
    await until(lambda: host.roster.ended(ONE), within_s=10)

    assert lives
    assert first.code is None
    assert list(host.roster.exits) == [structs.replace(first, code=lifelines.UNKNOWN)]
    assert host.roster.statuses == ()


async def test_a_worker_that_begins_to_exit_is_killed_without_a_record(host):
    """The store may be away: nothing is read from it here."""
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ENDING, str(host.path)), stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        try:
            await until(lambda: bool(host.roster.statuses), within_s=10)
            process.stdin.write(b"end\n")

            assert (await launcher.next_kill()).worker == ONE
        finally:
            process.kill()
            await process.wait()


async def test_a_worker_that_begins_to_exit_is_killed(host):
    """Only one thread may have ended, of a process that keeps computing."""
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        host.roster.exited(Exit(ONE, "job", None, at=0.0))
        await launcher.hello()

        assert (await launcher.next_kill()).worker == ONE


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_of_a_user_who_may_pass_none_are_discarded(tmp_path):
    before = open_files()
    with (
        AgentListener(frozenset()) as listener,
        tempfile.TemporaryFile() as file,
        socket.socket(socket.AF_UNIX) as client,
    ):
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        connection, _ = listener.accept()
        with connection:
            socket.send_fds(client, [b"hello"], [file.fileno()])
            data, within = connection.recv(100), open_files()
            received = listener.take_from(connection.fileno())

    # The listener, this file, this end and that end.
    assert (data, within, received) == (b"hello", before + 4, None)
    assert open_files() == before


async def test_received_descriptors_are_closed(host):
    """The first, and a second."""
    before = open_files()
    with tempfile.TemporaryFile() as file, socket.socket(socket.AF_UNIX) as client:
        await asyncio.to_thread(client.connect, str(host.path))
        hello = wire.encode(wire.TrainerHello(wire.VERSION, worker_status(ONE), 0, 1))
        for part in (hello[:9], hello[9:19]):
            socket.send_fds(client, [part], [file.fileno()])
        client.sendall(hello[19:])
        await until(lambda: bool(host.roster.statuses))
        within = open_files()
    await until(lambda: open_files() == before + 1)  # its process lives, so the pidfd stays

    # This file, this end, that end and the pidfd.
    assert within == before + 4


async def test_a_launcher_must_send_the_exit_code(host):
    async with connected(host.path) as connection:
        launcher = FakeLauncher(connection, "job", (ONE,))
        await launcher.hello()
        await launcher.exited(ONE, None)

        assert "must send the exit code" in await rejected(connection)


# --- misbehaving clients --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a tmd peer"),
        (b"\x03\x00\x00\x00abc", "bad message"),
        (wire.encode(wire.StatusReport(worker_status(ONE))), "expected a hello"),
        (
            wire.encode(wire.TrainerHello(99, worker_status(ONE), 0)),
            "install the same version of tmd",
        ),
        (wire.encode(wire.LauncherHello(0, "job", 1, ())), "install the same version of tmd"),
        (
            wire.encode(wire.TrainerHello(wire.VERSION, worker_status(ONE), 0))[4:].join(
                [b"\xff\xff\xff\xff", b""]
            ),
            "limit",
        ),
    ],
    ids=["http", "garbage", "no hello", "version", "launcher version", "oversize"],
)
async def test_a_stranger_is_told_why_and_disturbs_nobody(host, record, data, reason):
    async with trainer(host) as one, connected(host.path) as stranger:
        await one.hello()
        await stranger.send_raw(data)
        reported = await rejected(stranger)
        host.obey(record())

        assert reason in reported
        assert await one.directive(lambda d: isinstance(d, Train))


async def test_a_trainer_cannot_speak_for_another(host):
    async with connected(host.path) as connection:
        await FakeTrainer(connection, worker_status(ONE)).hello()
        await connection.send(wire.StatusReport(worker_status(TWO)))

        assert TWO in await rejected(connection)
        assert [s.worker for s in host.roster.statuses] == [ONE]


async def test_a_trainer_cannot_play_launcher(host):
    async with connected(host.path) as connection:
        await FakeTrainer(connection, worker_status(ONE)).hello()
        await FakeLauncher(connection, "job", ()).exited(TWO, 1)

        assert "cannot send" in await rejected(connection)


async def test_silence_instead_of_a_hello_ends_the_connection(tmp_path):
    """Without a refusal, after which a worker that was only paused would end."""
    async with Host(tmp_path, hello_s=0.05).serving() as host, connected(host.path) as connection:
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(asyncio.IncompleteReadError):
                await connection.receive()


async def test_clients_without_a_hello_make_room_for_others(tmp_path):
    """The oldest goes, without a refusal: a worker that is refused does not connect again."""
    async with Host(tmp_path, strangers=2).serving() as host, trainer(host) as known:
        await known.hello()
        async with (
            connected(host.path) as oldest,
            connected(host.path),
            connected(host.path),
        ):
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(asyncio.IncompleteReadError):
                    await oldest.receive()
            async with trainer(host, TWO) as another:
                await another.hello()
                await until(lambda: len(host.roster.statuses) == 2)

        assert {status.worker for status in host.roster.statuses} == {ONE, TWO}


async def test_a_user_that_is_not_listed_is_rejected(tmp_path):
    door = AgentSocket(path=tmp_path / "s", host="h", uids=frozenset(), key_of=lambda _: b"")
    host = Host(tmp_path)
    host.server, host.path = AgentServer(door, host.roster, host.records), door.path
    async with host.serving(), connected(host.path) as connection:
        assert "[host] users" in await rejected(connection)


async def test_a_directive_of_a_large_job_reaches_a_client_that_reads(host, record):
    """It is longer than what may wait for a client."""
    size = 16_384
    hosts = [f"ip-10-{n // 256}-{n % 256}-7.eu-central-1.compute.internal" for n in range(size)]
    members = tuple(Member(f"{h}/job/0.a", h, f"{h}:30000") for h in (*hosts[:-1], "h1"))
    async with trainer(host) as one:
        await one.hello()
        host.obey(record(membership=Membership(1, members), world_size=size))
        directive = await one.directive(lambda d: isinstance(d, Train))

        assert directive.membership.members == members
        assert len(wire.encode(one.orders[-1])) > wire.MAX_FRAME // 2 > 1 << 20
        assert host.roster.workers[ONE].connected


async def test_an_error_about_one_job_leaves_the_workers_of_others_connected(tmp_path, record):
    """It is logged, and their directives are sent."""

    class Broken(Records):
        def order(self, job, worker):
            if job == "broken":
                raise IndexError(job)
            return super().order(job, worker)

    host = Host(tmp_path)
    host.server._records = host.records = Broken(tmp_path)
    async with host.serving(), trainer(host) as one, connected(host.path) as connection:
        other = FakeTrainer(connection, worker_status("h1/broken/0.a", job="broken"))
        await other.hello()
        await one.hello()
        host.obey(record())
        await one.directive(lambda d: isinstance(d, Train))

        assert other.orders == []
        assert host.roster.workers["h1/broken/0.a"].connected


async def test_a_client_that_never_reads_is_cut_off(host, record):
    """Only a bounded number of its orders is queued."""
    async with trainer(host) as one:
        await one.hello()
        detail = "x" * 200_000
        for revision in range(1, 40):
            state = record(revision=revision, detail=f"{detail}{revision}")
            host.obey(structs.replace(state, state="failed"))
        await until(lambda: not host.roster.workers[ONE].connected)

        assert not host.roster.workers[ONE].connected


# --- the socket -----------------------------------------------------------------------------------


async def test_the_socket_is_private_and_removed_at_the_end(tmp_path):
    host = Host(tmp_path)
    async with host.serving():
        mode = os.stat(host.path).st_mode & 0o777

    assert mode == 0o600
    assert not host.path.exists()


async def test_only_the_socket_of_a_dead_daemon_is_replaced(tmp_path):
    first, second = Host(tmp_path), Host(tmp_path)
    bind(first.path, frozenset()).close()
    async with first.serving():
        with pytest.raises(ConfigError, match="another daemon"):
            await second.server.serve()
        async with trainer(first) as one:
            assert await one.hello()


def test_a_socket_that_cannot_be_made_is_named(tmp_path):
    """As its folder cannot be, if the daemon's user may not write there."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"\[host\] socket .*tmd.sock: Not a directory"):
        bind(tmp_path / "file" / "folder" / "tmd.sock", frozenset())


def test_users_are_given_by_name_or_number():
    assert uids_of(("root", "12345")) == {0, os.geteuid(), 12345}
    with pytest.raises(ConfigError, match="no user 'nobody-here'"):
        uids_of(("nobody-here",))


def test_only_a_directive_may_be_long():
    """It has all members of its job. The daemon reads no long message of a client."""
    member = Member("w" * 1000, "h", "a")
    order = wire.DirectiveOrder(1, 1, Train(Membership(1, (member,) * 5000), 0))
    report = wire.StatusReport(structs.replace(worker_status(ONE), detail="x" * wire.MAX_FRAME))
    frame = wire.encode(order)

    assert wire.body_size(frame[: wire.HEADER_SIZE], wire.MAX_DIRECTIVE) > wire.MAX_FRAME
    with pytest.raises(WireError, match="announced, limit"):
        wire.body_size(frame[: wire.HEADER_SIZE])
    with pytest.raises(WireError, match=r"StatusReport is .* bytes, limit"):
        wire.encode(report)


def test_text_that_is_no_unicode_is_escaped():
    """A file name in a report must not end the thread that talks to the daemon."""
    status = structs.replace(worker_status(ONE), detail="cannot read /data/\udcff")
    body = wire.encode(wire.StatusReport(status))[wire.HEADER_SIZE :]

    assert wire.decode(body) == wire.StatusReport(
        structs.replace(status, detail="cannot read /data/\\udcff")
    )


def test_messages_survive_the_wire():
    message = wire.LauncherHello(wire.VERSION, "job", 1, ("w",))

    assert wire.decode(wire.encode(message)[wire.HEADER_SIZE :]) == message
    assert msgspec.msgpack.decode(wire.encode(message)[4:])["type"] == "LauncherHello"


async def test_a_launcher_is_notified_once_of_an_unfit_standby_and_once_when_it_is_fit(host):
    refusal = Rehearsal(step=5, seconds=1.0, refusal="the model differs")
    async with connected(host.path) as one, connected(host.path) as other:
        launcher = FakeLauncher(one, "job", (ONE,))
        await launcher.hello()
        trainer = FakeTrainer(other, worker_status(ONE))
        await trainer.hello()
        for verdicts in ((refusal,), (refusal,), ()):
            await trainer.say(activity=Activity.STANDBY, rehearsed=verdicts)
        first, second = await launcher.next_notice(), await launcher.next_notice()

    assert first.text == "standby is unfit: it gets no rank: the model differs"
    assert (second.worker, second.text) == (ONE, "standby is fit again")


async def test_a_launcher_without_support_for_notices_gets_none(host, record):
    """It would treat one as an invalid message and disconnect."""
    refusal = Rehearsal(step=5, seconds=1.0, refusal="the model differs")
    async with connected(host.path) as one, connected(host.path) as other:
        await one.send(wire.LauncherHello(wire.VERSION, "job", 1, (ONE,)))
        trainer = FakeTrainer(other, worker_status(ONE))
        await trainer.hello()
        await trainer.say(activity=Activity.STANDBY, rehearsed=(refusal,))
        await until(lambda: host.roster.workers[ONE].status.unfit != "")
        host.obey(failed(record(), ONE, TWO))
        first = await one.receive()

    assert isinstance(first, wire.Kill)
