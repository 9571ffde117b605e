"""A process that is out of threads or descriptors for a moment works again afterwards."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from tests.fabric.circle import circle, member
from tests.trainer.wire import Facts, linked
from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.fabric.frame import VOTE
from tmd.fabric.link_watch import LinkWatch
from tmd.fabric.serial_executor import SerialExecutor

pytestmark = pytest.mark.timeout(60)


@contextmanager
def without_threads(prefix: str) -> Iterator[list[str]]:
    """No thread of this name can be started; yields the names of those refused."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield refused


def test_callers_are_accepted_after_one_whose_messages_had_no_reader() -> None:
    with circle(2) as c:
        c.group()
        here, there = c.fabrics
        with without_threads("tmd-read") as refused:
            c.of(here).send([torch.ones(3)], 1)
            Facts().until(lambda: bool(refused))
        link = here.connect(member(there), "later", timeout=5)
        assert link.peer == there.worker
        link.close()


def test_a_job_runs_after_one_without_a_thread() -> None:
    ran = threading.Event()
    lane = SerialExecutor("lane")
    with without_threads("lane"), pytest.raises(RuntimeError):
        lane.run(ran.set, inline=False)
    assert not lane.busy
    lane.run(ran.set, inline=False)
    assert ran.wait(5)
    lane.close()


class Epoch:
    """An epoch to which every link belongs."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    def has(self, link: Link) -> bool:
        return True

    def blame(self, error: LinkError) -> None:
        self.lost.set()


def test_the_end_of_a_peer_is_noticed_after_a_link_without_a_watch() -> None:
    epoch = Epoch()
    watch = LinkWatch(lambda: epoch)
    watch.enabled = True
    with linked() as (first, _), linked() as (second, peer):
        with without_threads("tmd-link-watch") as refused:
            watch.opened(VOTE, first)
            assert refused
        watch.opened(VOTE, second)
        peer.close()
        assert epoch.lost.wait(5)
        watch.close()


def take_all(taken: list[int]) -> None:
    """Open descriptors until there are none, and note them in ``taken``."""
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))


def test_a_process_without_descriptors_accepts_callers_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with circle(2) as c, socket.socket() as caller:
        here, there = c.fabrics
        host, _, port = there.address.rpartition(":")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
        taken: list[int] = []
        try:
            take_all(taken)
            caller.connect((host, int(port)))
            Facts().until(lambda: "Too many open files" in caplog.text)
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        here.connect(member(there), "later", timeout=5).close()
        assert caplog.text.count("Too many open files") == 1
