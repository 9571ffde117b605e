"""The first exchange between a trainer and the daemon of its host."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.trainer.wire import Facts
from tmd import wire
from tmd.core.planning.directives import Leave, Wait
from tmd.core.values.errors import TmdError
from tmd.core.values.model import Activity, WorkerStatus
from tmd.trainer.worker.agent import Agent

STATUS = WorkerStatus("h1/j/0.a", "j", 1, "", 1, Activity.STARTING)
WELCOME = wire.Welcome("h1", b"k" * 32)


def agent(path):
    return Agent(path, lambda: STATUS, lambda _: None)


def answer(door, reply=WELCOME):
    """A daemon's answer to the first client; returns the client's introduction."""
    connection, _ = door.accept()
    with connection:
        size = wire.body_size(connection.recv(wire.HEADER_SIZE, socket.MSG_WAITALL))
        hello = wire.decode(connection.recv(size, socket.MSG_WAITALL))
        connection.sendall(wire.encode(reply))
    return hello.status.worker


@contextmanager
def started(subject, path):
    """The socket of a daemon that has welcomed ``subject`` and then hung up."""
    with socket.socket(socket.AF_UNIX) as door, ThreadPoolExecutor() as pool:
        door.bind(str(path))
        door.listen()
        pool.submit(answer, door)
        subject.introduce()
        subject.start()
        yield door


def test_a_daemon_that_comes_up_later_is_waited_for(tmp_path, monkeypatch):
    """When a host starts, its launcher may be faster than its daemon."""
    path = tmp_path / "tmd.sock"
    tried = threading.Event()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: (tried.set(), sleep(s)))
    with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX) as door:
        subject = agent(path)
        welcome = pool.submit(subject.introduce)
        assert tried.wait(10)
        door.bind(str(path))
        door.listen()

        assert answer(door) == STATUS.worker
        assert welcome.result(10) == WELCOME
        subject.start()
        subject.close()


def test_no_error_of_a_report_ends_the_thread(tmp_path):
    """Without it no failover could halt the rank."""
    path = tmp_path / "tmd.sock"
    asked = iter([STATUS, RuntimeError("unlucky"), *[STATUS] * 100])

    def current():
        found = next(asked)
        if isinstance(found, Exception):
            raise found
        return found

    subject = Agent(path, current, lambda _: None)
    with started(subject, path) as door:
        assert answer(door) == STATUS.worker
        subject.close()


def logged(caplog, word):
    return [r.getMessage() for r in caplog.records if word in r.getMessage()]


def test_a_daemon_that_comes_and_goes_for_days_does_not_fill_a_log(tmp_path, monkeypatch, caplog):
    """It rejects the worker, or hangs up at once: another process may have taken its name."""
    path = tmp_path / "tmd.sock"
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda _: sleep(0.01))
    caplog.set_level("INFO", "tmd.trainer")
    subject = agent(path)
    with started(subject, path) as door:
        for _ in range(20):
            answer(door, wire.Rejected("no such user"))
            answer(door)
        lost = logged(caplog, "the daemon cannot be reached, training continues: ")
        subject.close()

    assert sum("no such user" in line for line in lost) == 1
    assert len(lost) == len(set(lost)) <= 4
    assert logged(caplog, "the daemon is reached again") == []


def test_a_daemon_that_is_back_is_named_and_its_next_loss_too(tmp_path, caplog):
    """Its reason to reject a worker that it knew is named as well."""
    path = tmp_path / "tmd.sock"
    caplog.set_level("INFO", "tmd.trainer")
    subject = Agent(path, lambda: STATUS, lambda _: None, lasting_s=0.0)
    with started(subject, path) as door:
        for _ in range(2):
            connection, _ = door.accept()
            with connection:
                connection.sendall(wire.encode(WELCOME))
                for _ in range(3):  # the hello, and two reports: the connection has lasted
                    size = wire.body_size(connection.recv(wire.HEADER_SIZE, socket.MSG_WAITALL))
                    connection.recv(size, socket.MSG_WAITALL)
                connection.sendall(wire.encode(wire.Rejected("a reason")))
                while connection.recv(1 << 16):
                    pass
        Facts().until(lambda: len(logged(caplog, "a reason")) == 2)
        subject.close()

    assert len(logged(caplog, "the daemon is reached again")) == 2


def test_a_daemon_that_never_comes_is_named(tmp_path):
    with pytest.raises(TmdError, match=r"no tmd daemon answers on .*tmd\.sock.*is it running"):
        agent(tmp_path / "tmd.sock").introduce(patience_s=0.0)


def test_a_directive_is_known_even_if_it_cannot_be_carried_out(tmp_path):
    """The main thread may wait for it, and would sleep for good: no later one need come."""

    def fail(directive):
        raise RuntimeError("can't start new thread")

    subject, looked, found = Agent(tmp_path, lambda: STATUS, fail), threading.Event(), []
    waiting = threading.Thread(
        target=lambda: found.append(
            subject.wait_until(lambda d: looked.set() or isinstance(d, Leave))
        ),
        daemon=True,
    )
    with pytest.raises(RuntimeError, match="can't start"):
        subject._obey(wire.DirectiveOrder(1, 1, Wait()))
    waiting.start()
    assert looked.wait(10)
    with pytest.raises(RuntimeError, match="can't start"):
        subject._obey(wire.DirectiveOrder(1, 1, Leave()))
    waiting.join(10)

    assert found == [Leave()]
