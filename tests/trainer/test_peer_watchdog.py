"""A rank that waits long calls its neighbours."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.fabric.circle import PATIENCE, Circle, at_once, circle
from tests.trainer.wire import Facts
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric import EpochView, Fabric
from tmd.fabric.dial import PATIENCE_S
from tmd.trainer.worker.peer_watchdog import LONG, MISSES, MISSES_AT_FIRST, PeerWatchdog


class Gate:
    """An address in front of a fabric, to which it forwards callers. It closes each call at once
    while ``refusing``. While ``frozen`` it accepts calls and never answers, like a frozen host."""

    def __init__(self, fabric: Fabric) -> None:
        self.calls = 0
        self.refusing = self.frozen = False
        self._unanswered: list[socket.socket] = []
        self._target = fabric.address
        self._carriers: list[threading.Thread] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.member = Member(fabric.worker, "here", f"127.0.0.1:{self._door.getsockname()[1]}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._door.close()
        for near in self._unanswered:
            near.close()
        for carrier in self._carriers:
            carrier.join(PATIENCE)
            assert not carrier.is_alive()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            self.calls += 1
            if self.frozen:
                self._unanswered.append(near)
                continue
            if self.refusing:
                near.close()
                continue
            carrier = threading.Thread(target=self._carry, args=(near,), daemon=True)
            self._carriers.append(carrier)
            carrier.start()

    def _carry(self, near: socket.socket) -> None:
        """Both ways, until one side hangs up."""
        host, _, port = self._target.rpartition(":")
        far = socket.create_connection((host, int(port)))
        with near, far, selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(near, selectors.EVENT_READ, (near, far))
            selector.register(far, selectors.EVENT_READ, (far, near))
            while True:
                for key, _ in selector.select():
                    source, target = key.data
                    if not (data := source.recv(1 << 16)):
                        return
                    target.sendall(data)


class Scene:
    """Rank 0 of four, with links to the ranks ``near``."""

    def __init__(self, c: Circle, near: tuple[int, ...]) -> None:
        self._near = near
        self.gates = {fabric.worker: Gate(fabric) for fabric in c.fabrics}
        self.circle = c
        for rank in near:
            c.group(f"0 and {rank}", (0, rank))
        self.enter(2, {})
        self.waits = True
        self.between_epochs = False
        self.watchdog = PeerWatchdog(self._now, lambda: self.waits)

    def enter(self, epoch: int, adopted: dict[int, int]) -> None:
        """All workers enter an epoch in which some of them have adopted ranks."""
        members = tuple(gate.member for gate in self.gates.values())
        membership = Membership(epoch, members).shrunk(adopted)
        for rank in membership.crew(range(len(members))):
            self.circle.fabrics[rank].enter(membership, rank)
            self.circle.fabrics[rank].passes.open_step()
        for rank in self._near:
            self.circle.allreduce(name=f"0 and {rank}")
        for gate in self.gates.values():
            gate.calls = 0
        standing = self.circle.fabrics[0].standing
        assert standing is not None
        self.standing = standing

    @property
    def called(self) -> list[str]:
        return [worker for worker, gate in self.gates.items() if gate.calls]

    def looks(self, times: int) -> None:
        for _ in range(times):
            self.watchdog.look()

    def close(self) -> None:
        for gate in self.gates.values():
            gate.close()

    def _now(self) -> EpochView | None:
        return None if self.between_epochs else self.standing


@contextmanager
def four(patience_s: float = PATIENCE_S, near: tuple[int, ...] = (1, 3)) -> Iterator[Scene]:
    with circle(4, patience_s) as c:
        made = Scene(c, near)
        yield made
        c.close()
        made.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with four() as made:
        yield made


@pytest.fixture
def hasty() -> Iterator[Scene]:
    """A call to a frozen host fails after a moment instead of seconds. Rank 0 has no links: a peer
    that answers would miss such calls, too, on a busy machine."""
    with four(0.01, near=()) as made:
        yield made


def test_a_neighbour_that_misses_calls_in_a_row_counts_as_lost(scene: Scene) -> None:
    scene.gates["w3"].refusing = True
    scene.looks(LONG + MISSES - 2)
    before = scene.standing.poisoned
    scene.looks(1)

    assert not before
    assert scene.standing.suspects == ("w3",)
    assert scene.called == ["w1", "w3"], "only neighbours are called"


def test_a_neighbour_that_holds_two_ranks_is_called_once_a_look(scene: Scene) -> None:
    scene.enter(3, {2: 3})
    scene.gates["w3"].refusing = True
    scene.looks(LONG + MISSES - 2)

    assert scene.gates["w3"].calls == MISSES - 1
    assert not scene.standing.poisoned


def test_a_peer_to_which_a_link_is_being_opened_is_called(hasty: Scene) -> None:
    """The peer may have frozen before its first link was open, and nobody else would notice. It may
    also be busy for minutes before its first collective, so that more calls may fail."""
    hasty.gates["w2"].frozen = True
    poisoned: list[bool] = []

    def open_one() -> None:
        with pytest.raises(LinkError):
            hasty.standing.link("late", 2)

    def look() -> None:
        Facts().until(lambda: "w2" in hasty.standing.opening)
        hasty.looks(LONG + MISSES_AT_FIRST - 2)
        poisoned.append(hasty.standing.poisoned)
        hasty.looks(1)

    at_once([open_one, look])
    assert poisoned == [False]
    assert hasty.standing.suspects == ("w2",)


def test_no_neighbour_is_called_before_the_wait_is_long(scene: Scene) -> None:
    scene.looks(LONG - 1)
    scene.waits = False
    scene.looks(1)
    scene.waits = True
    scene.looks(LONG - 1)

    assert scene.called == []


def test_an_answered_call_resets_the_count(scene: Scene) -> None:
    scene.looks(LONG - 1)
    for refusing in (True, True, False, True, True):
        scene.gates["w3"].refusing = refusing
        scene.looks(1)

    assert [gate.calls for gate in scene.gates.values()] == [0, 5, 0, 5]
    assert not scene.standing.poisoned


def test_no_neighbour_is_called_between_two_epochs(scene: Scene) -> None:
    scene.between_epochs = True
    scene.looks(LONG + MISSES)

    assert scene.called == []
