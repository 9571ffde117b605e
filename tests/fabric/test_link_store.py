"""The members of an inner group meet in a store that one of them keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from msgspec import msgpack

from tests.fabric.circle import KEY, Circle, circle, member
from tests.trainer.wire import linked
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Membership
from tmd.fabric import Fabric, GroupView
from tmd.fabric.generations.gloo import GlooKind
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.generations.link_store import LinkStore, SharedValues, meeting
from tmd.fabric.link import Link

pytestmark = pytest.mark.timeout(60)

SOON_S = 20.0
VIEW = GroupView("world", (0, 1, 2))


def wanted() -> bool:
    return True


def met(c: Circle, act: Callable[[LinkStore, int], object]) -> list[object]:
    """Run ``act`` with the store and the rank of each member, at once."""

    def one(fabric: Fabric) -> object:
        with meeting(fabric, GroupRequest(VIEW, c.membership, wanted)) as store:
            return act(store, fabric.rank or 0)

    found: list[object] = c.each(one)
    return found


@contextmanager
def begun(fabric: Fabric, membership: Membership, wanted: Callable[[], bool]) -> Iterator[Future]:
    """A member that meets the others in a thread of its own."""

    def one() -> str:
        with meeting(fabric, GroupRequest(VIEW, membership, wanted)):
            return "met"

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(one)


def test_all_members_see_the_same_values() -> None:
    def act(store: LinkStore, rank: int) -> object:
        store.set(f"id/{rank}", bytes([rank]))
        total = store.add("members", 1)
        store.wait([f"id/{each}" for each in range(3)])
        seen = [store.get(f"id/{each}") for each in range(3)]
        return seen, 1 <= total <= 3, store.check(["id/0"]), store.check(["id/9"])

    with circle(3) as c:
        assert met(c, act) == [([b"\0", b"\1", b"\2"], True, True, False)] * 3


@pytest.mark.parametrize("user", [0, 2, None])
def test_all_members_know_whether_one_has_used_the_group(user: int | None) -> None:
    """A joiner has not; it builds what the others need."""

    def one(fabric: Fabric) -> bool:
        device = torch.device("cpu") if fabric.rank == user else None
        with meeting(fabric, GroupRequest(VIEW, c.membership, wanted, device)) as store:
            return store.needed

    with circle(3) as c:
        assert c.each(one) == [user is not None] * 3


def test_a_value_is_replaced_only_as_expected() -> None:
    def act(store: LinkStore, rank: int) -> object:
        if rank:
            return None
        return (
            store.compare_set("a", b"", b"one"),
            store.compare_set("a", b"two", b"three"),
            store.compare_set("a", b"one", b"two"),
            store.delete_key("a"),
            store.delete_key("a"),
        )

    with circle(3) as c:
        assert met(c, act)[0] == (b"one", b"one", b"two", True, False)


def test_a_value_that_does_not_come_is_an_error_after_the_time_out() -> None:
    def act(store: LinkStore, rank: int) -> object:
        with pytest.raises(RuntimeError, match=r"no absent in the store after 0\.01 s"):
            store.wait(["absent"], timedelta(seconds=0.01))
        return rank

    with circle(3) as c:
        assert met(c, act) == [0, 1, 2]


def test_nobody_builds_before_all_have_come() -> None:
    with circle(3) as c, begun(c.fabrics[1], c.membership, wanted) as early:
        with pytest.raises(TimeoutError):
            early.result(0.05)
        met_late = c.each(lambda f: _meet(f, c.membership), [c.fabrics[0], c.fabrics[2]])
        assert (early.result(SOON_S), met_late) == ("met", ["met", "met"])


def _meet(fabric: Fabric, membership: Membership) -> str:
    with meeting(fabric, GroupRequest(VIEW, membership, wanted)):
        return "met"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_build_that_is_called_off_waits_no_longer(rank: int) -> None:
    """For the others, or for the member that keeps the values."""
    off = threading.Event()
    with circle(3) as c, begun(c.fabrics[rank], c.membership, lambda: not off.is_set()) as early:
        off.set()
        with pytest.raises(LinkError, match=r"dropped|cancelled"):
            early.result(SOON_S)


def test_a_dropped_build_does_not_disturb_the_next_of_the_same_epoch() -> None:
    """The plan is dropped, and another one for the same epoch has the same or another joiner."""
    with circle(3) as c:
        off = threading.Event()
        for _ in range(2):
            off.clear()
            with begun(c.fabrics[1], c.membership, lambda: not off.is_set()) as early:
                off.set()
                assert early.exception(SOON_S) is not None
        assert c.each(lambda f: _meet(f, c.membership)) == ["met"] * 3


def test_a_store_that_is_over_is_empty_and_keeps_nothing() -> None:
    """A backend may ask again when it ends; nobody is there to answer."""
    stores: list[LinkStore] = []
    with circle(3) as c:
        met(c, lambda store, _: stores.append(store))
    for store in stores:
        store.set("a", b"1")
        assert (store.check(["a"]), store.num_keys(), store.delete_key("a")) == (False, 0, False)
        with pytest.raises(RuntimeError, match="is closed"):
            store.get("a")


def test_a_stranger_keeps_no_values() -> None:
    """The keeper is the member's process, by the key of the job."""
    with circle(3) as c:
        stranger = Fabric("w0", KEY[::-1])
        try:
            members = (member(stranger), *c.membership.members[1:])
            false = Membership(epoch=1, members=members)
            off = threading.Event()
            with begun(c.fabrics[1], false, lambda: not off.is_set()) as early:
                with pytest.raises(TimeoutError):
                    early.result(0.3)
                off.set()
                assert isinstance(early.exception(SOON_S), LinkError)
        finally:
            stranger.close()


def test_cpp_code_reaches_all_of_the_store() -> None:
    """A backend calls the store by its names in C++."""

    def act(store: LinkStore, rank: int) -> object:
        if rank:
            return None
        through = dist.PrefixStore("own", store)
        through.set("a", "1")
        before = through.num_keys()
        return through.delete_key("a"), through.delete_key("a"), before - through.num_keys()

    with circle(3) as c:
        assert met(c, act)[0] == (True, False, 1)


@contextmanager
def served(board: SharedValues) -> Iterator[Link]:
    """A member's link to ``board``."""
    with linked() as (member, keeper):
        serving = threading.Thread(target=board.serve, args=(keeper,))
        serving.start()
        try:
            yield member
        finally:
            member.close()
            serving.join(SOON_S)
            assert not serving.is_alive()


def say(link: Link, *request: object) -> None:
    link.send_frame(msgpack.encode(request))
    link.recv_frame(100)


def test_a_member_that_hangs_up_before_all_have_come_is_not_here() -> None:
    """The others would begin to build without it. It may call again before its first link ends, and
    that link may be served after the second one."""
    board = SharedValues(["w0", "w1", "w2"], wanted)
    with served(board) as link:
        say(link, "set", "here/w1", b"")
    assert not board.answer("check", (["here/w1"],))

    with served(board) as again:
        with served(board) as first:
            say(first, "set", "here/w1", b"")
            say(again, "set", "here/w1", b"")
        assert board.answer("check", (["here/w1"],))
        with served(board) as overtaken:
            say(overtaken, "set", "here/w1", b"")
        assert board.answer("check", (["here/w1"],))
    assert not board.answer("check", (["here/w1"],))


def test_a_member_that_is_done_first_stays_here() -> None:
    """Others may not have seen yet that all had come."""
    board = SharedValues(["w0", "w1"], wanted)
    board.answer("set", ("here/w0", b""))
    with served(board) as link:
        say(link, "set", "here/w1", b"")
    assert board.answer("check", (["here/w0", "here/w1"],))


@pytest.mark.parametrize("frame", [b"\xc1", msgpack.encode(5), msgpack.encode(["set"])])
def test_a_request_that_cannot_be_read_ends_the_link(frame: bytes) -> None:
    """Its sender would wait for the answer."""
    with served(SharedValues(["w0"], wanted)) as link:
        link.send_frame(frame)
        with pytest.raises(LinkError):
            link.recv_frame(100)


def test_an_inner_group_keeps_its_store() -> None:
    """C++ code keeps only its own half of it, and cannot ask that."""
    with circle(2) as c:
        view = GroupView("pair", (0, 1))
        request = GroupRequest(view, c.membership, wanted, torch.device("cpu"))
        inner, _ = c.each(lambda f: GlooKind(f).build(request))
        assert isinstance(inner._store, LinkStore)
