"""Where the members of an inner group meet: a store of torch over links, for one build.

The group's first rank keeps the values and serves the others. No further process is needed. If the
first rank is lost, only the build fails. A build begins once all members have arrived, so that none
waits for long inside a call that cannot be cancelled.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from msgspec import MsgspecError, msgpack
from xxhash import xxh64_hexdigest

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member
from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.inner import GroupRequest, Wanted
from tmd.fabric.link import Link
from tmd.torch_private.c10d import Store

LIMIT = 1 << 20
"""Largest request or reply in bytes."""
DIAL_S = 2.0
AGAIN_S = 0.05
"""Pause before the server of the store is called again."""
LOOK_S = 0.1
"""Interval at which a waiting thread checks whether the build is still wanted."""
TIMEOUT = timedelta(minutes=5)
HERE = "here/"
"""Prefix of the keys by which members say that they are here, and whether they need the group."""
NEEDED = b"needed"

log = logging.getLogger("tmd.trainer")

Ask = Callable[[str, Sequence[Any]], Any]


class SharedValues:
    """Values by key, for ``members``. Thread-safe."""

    def __init__(self, members: Sequence[str], wanted: Wanted) -> None:
        self._members, self._wanted = members, wanted
        self._values: dict[str, bytes] = {}
        self._came_by: dict[str, set[Link]] = {}
        """By key under ``HERE``: the links over which that member has said that it is here. Two if
        it has called again: the link that it gave up may be served after the new one."""
        self._changed = threading.Condition()

    def answer(self, request: str, arguments: Sequence[Any]) -> Any:
        """Carry out the request of a member.

        Raises:
            LookupError: a key is missing after the time-out of the request.
            LinkError: the build is not wanted any more.
        """
        match request, arguments:
            case "set", (str(key), bytes(value)):
                return self._put(key, value)
            case "add", (str(key), int(amount)):
                with self._changed:
                    total = int(self._values.get(key, b"0")) + amount
                    self._put(key, str(total).encode())
                return total
            case "swap", (str(key), bytes(expected), bytes(desired)):
                with self._changed:
                    present = self._values.get(key)
                    if present == expected or (present is None and not expected):
                        self._put(key, desired)
                    return self._values.get(key, expected)
            case "wait", (list(keys) | tuple(keys), float(seconds)):
                return self._await(keys, seconds)
            case "check", (list(keys) | tuple(keys),):
                return all(key in self._values for key in keys)
            case "delete", (str(key),):
                with self._changed:
                    return self._values.pop(key, None) is not None
            case "count", ():
                return len(self._values)
        raise LinkError(f"malformed request {request!r} to the store of a group")

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _await(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not all(key in self._values for key in keys):
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [key for key in keys if key not in self._values]
                    raise LookupError(f"no {missing[0]} in the store after {seconds} s")
                if not self._wanted():
                    raise LinkError("the build was dropped")
                self._changed.wait(min(left, LOOK_S))
            return [self._values[key] for key in keys]

    def serve(self, link: Link) -> None:
        """Answer one member until it hangs up."""
        try:
            while True:
                request, *arguments = msgpack.decode(link.recv_frame(LIMIT))
                if request == "set" and str(arguments[0]).startswith(HERE):
                    self._came(str(arguments[0]), link)
                try:
                    reply: tuple[bool, Any] = (True, self.answer(request, arguments))
                except LookupError as error:
                    reply = (False, str(error.args[0]))
                link.send_frame(msgpack.encode(reply))
        except (LinkError, MsgspecError, LookupError, TypeError, ValueError) as error:
            log.debug("the store of a group no longer serves %s: %s", link.peer, error)
        finally:
            self._forget(link)
            link.close()

    def _came(self, key: str, link: Link) -> None:
        with self._changed:
            self._came_by.setdefault(key, set()).add(link)

    def _forget(self, link: Link) -> None:
        """A member that hangs up before all have come is not here; it may call again."""
        with self._changed:
            if all(f"{HERE}{member}" in self._values for member in self._members):
                return
            for key in (f"{HERE}{member}" for member in self._members):
                links = self._came_by.get(key, set())
                if links == {link}:
                    self._values.pop(key, None)
                links.discard(link)


class LinkStore(Store):
    """One member's view of the values, in torch's interface.

    ``ask`` carries out a request. Once the store is closed it is empty and keeps nothing: a backend
    may ask again when it ends. Whatever uses it from C++ must keep this object, too.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.needed = True
        """Whether a member needs the group."""
        self._ask = ask
        self._patience = TIMEOUT
        self._closed = False

    def set(self, key: str, value: bytes | str) -> None:
        if not self._closed:
            self._ask("set", (key, value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises RuntimeError after the time-out."""
        return self._wait([key], self._patience)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises RuntimeError after the time-out."""
        self._wait(keys, timeout or self._patience)

    def _wait(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        if self._closed:
            raise RuntimeError(f"cannot wait for {keys[0]}: the store is closed")
        try:
            found: list[bytes] = self._ask("wait", (keys, timeout.total_seconds()))
        except LookupError as error:
            raise RuntimeError(error.args[0]) from None
        return found

    def add(self, key: str, amount: int) -> int:
        return 0 if self._closed else int(self._ask("add", (key, amount)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        pair = [v.encode() if isinstance(v, str) else v for v in (expected, desired)]
        return pair[0] if self._closed else bytes(self._ask("swap", (key, *pair)))

    def check(self, keys: list[str]) -> bool:
        return not self._closed and bool(self._ask("check", (keys,)))

    def delete_key(self, key: str) -> bool:
        return not self._closed and bool(self._ask("delete", (key,)))

    def num_keys(self) -> int:
        return 0 if self._closed else int(self._ask("count", ()))

    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    def clone(self) -> LinkStore:
        """Itself: any thread may ask."""
        return self

    def close(self) -> None:
        self._closed = True


@contextmanager
def meeting(fabric: Fabric, request: GroupRequest) -> Iterator[LinkStore]:
    """The store of one build, once all members of the group are here.

    Raises:
        LinkError: the build is no longer ``wanted``, or the first rank is gone.
    """
    members, wanted = request.members, request.wanted
    # An epoch may be prepared again with another joiner.
    place = xxh64_hexdigest("/".join(members).encode())
    epoch, name = request.membership.epoch, request.view.name
    purpose = f"generation/{epoch}.{request.round}/{name}/{place}"
    needs = NEEDED if request.device is not None else b""
    if fabric.worker == members[0]:
        keeping = _kept(fabric, members, purpose, needs, wanted)
    else:
        keeping = _called(fabric, request, purpose, needs)
    with keeping as ask:
        store = LinkStore(ask)
        try:
            arrived = _await_all(ask, [f"{HERE}{worker}" for worker in members], wanted)
            store.needed = NEEDED in arrived
            request.met()
            yield store
        finally:
            store.close()


def _await_all(ask: Ask, keys: Sequence[str], wanted: Wanted) -> Sequence[bytes]:
    while wanted():
        with suppress(LookupError):
            found: Sequence[bytes] = ask("wait", (keys, 10 * LOOK_S))
            return found
    raise LinkError("the build was dropped")


@contextmanager
def _kept(
    fabric: Fabric, members: Sequence[str], purpose: str, needs: bytes, wanted: Wanted
) -> Iterator[Ask]:
    """Keep the values here, and serve the other members until each has hung up."""
    board, over = SharedValues(members, wanted), threading.Event()
    board.answer("set", (f"{HERE}{fabric.worker}", needs))

    def admit() -> None:
        with suppress(LinkError):
            while True:
                link = fabric.accept(purpose, cancel=lambda: over.is_set() or not wanted())
                threading.Thread(
                    target=board.serve, args=(link,), name="tmd-store-link", daemon=True
                ).start()

    threading.Thread(target=admit, name="tmd-store", daemon=True).start()
    try:
        yield board.answer
    finally:
        over.set()  # all members have called by now, or the build has failed


@contextmanager
def _called(fabric: Fabric, request: GroupRequest, purpose: str, needs: bytes) -> Iterator[Ask]:
    """Ask the worker that keeps the values."""
    wanted, server = request.wanted, request.membership.members[request.view.ranks[0]]
    link = _dialled(fabric, server, purpose, needs, wanted)
    asking = threading.Lock()

    def ask(verb: str, arguments: Sequence[Any]) -> Any:
        with asking:
            good, answer = _asked(link, (verb, *arguments), wanted)
        if not good:
            raise LookupError(answer)
        return answer

    try:
        yield ask
    finally:
        link.close()


def _dialled(fabric: Fabric, server: Member, purpose: str, needs: bytes, wanted: Wanted) -> Link:
    """A link on which the server has answered. It may not be listening yet; it is called until it
    is."""
    pause = AGAIN_S
    while wanted():
        link: Link | None = None
        try:
            link = fabric.connect(server, purpose, timeout=DIAL_S)
            _asked(link, ("set", f"{HERE}{fabric.worker}", needs), wanted)
            return link
        except LinkError:
            if link is not None:
                link.close()
            time.sleep(pause)
            pause = min(2 * pause, DIAL_S)
    raise LinkError("the build was dropped")


def _asked(link: Link, request: Sequence[Any], wanted: Wanted) -> tuple[bool, Any]:
    """Send a request, and wait for the reply, which may come much later."""
    link.send_frame(msgpack.encode(request))
    poll = select.poll()
    with link.in_use() as sock:
        poll.register(sock, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            if not wanted():
                raise LinkError("the build was dropped")
    good, answer = msgpack.decode(link.recv_frame(LIMIT))
    return good, answer
