"""Receives the frames of the shadowed rank and sorts them by consumer.

A thread reads the link. The script's collectives take their outputs from here as from the network
(:class:`tmd.fabric.OutputSource`), in the order of the source. Received frames stay usable after
the link has ended: the source may leave before its shadow has caught up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import msgpack
from torch import Tensor

from tmd.core.planning.directives import Prepare, ShadowRank
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.reasons import in_words
from tmd.fabric import Fabric, Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    SHIFT,
    VOTE,
    Boundary,
    ControlMessage,
    DigestCheck,
    Dropped,
    Frame,
    Opening,
    Output,
    Unit,
)
from tmd.trainer.shadow.lag import EvaluationTime
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.units import digest_of_inputs
from tmd.trainer.state_transfer.transfer import CONNECT_TIMEOUT_S

ENDING_S = 2.0
CALLS_ALL = "a shadow must call all that its rank calls, whether or not its step counts"
LOOK_S = 0.005
"""Interval at which a link is checked that may receive nothing more."""


def ask(fabric: Fabric, directive: Prepare | ShadowRank) -> tuple[Link, Opening | Dropped]:
    """Ask the source of ``directive`` for the state of its rank, and for all that follows.

    The source may not be in its loop now. Raises LinkError.
    """
    link = fabric.connect(directive.source, frames.PURPOSE, timeout=CONNECT_TIMEOUT_S)
    try:
        request = frames.ShadowRequest("", directive.plays)
        if isinstance(directive, Prepare):
            request = frames.ShadowRequest(directive.plan, directive.plays, directive.adopted)
        frames.send(link, frames.Envelope(request))
        link.patience(CONNECT_TIMEOUT_S)
        answer, _ = frames.receive(link)
        link.patience(0)
        if not isinstance(answer, Opening | Dropped):
            raise LinkError(f"{link.peer} answered with {type(answer).__name__}")
    except LinkError:
        link.close()
        raise
    return link, answer


class Arrival(NamedTuple):
    """A frame, its tensors and its time of arrival (monotonic)."""

    frame: Frame
    tensors: list[Tensor]
    at: float


class ShadowReceiver:
    """Owns the link and the thread that reads it. ``close`` ends both.

    Args:
        link: the link on which the source answered ``ShadowRequest``.
        bound: bytes that may wait; with more the joiner cannot keep up.
    """

    def __init__(self, link: Link, bound: int) -> None:
        self._link = link
        self._bound = bound
        self._arrived = threading.Condition()
        self._state: deque[Arrival] = deque()
        self._channels: dict[str, deque[tuple[int, Arrival]]] = {}
        self._waiting = 0
        """Bytes received and not yet used."""
        self._stream_step = 0
        """Step of the latest boundary received."""
        self.evaluations = EvaluationTime()
        self._ended: LinkError | None = None
        self.starved = False
        """Whether an output never came, so that the current step is void."""
        self.mismatch = ""
        """How the script's operations differ from the source's."""
        self._thread = threading.Thread(target=self._read, name="tmd-shadow", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # as after a link that broke: another attempt may get one
            self._ended = LinkError(in_words(error))
            link.close()

    def send(self, frame: Frame) -> None:
        """Send a frame to the source. Raises LinkError."""
        frames.send(self._link, frames.Envelope(frame))

    def close(self) -> None:
        """Stop; all waiting threads get an error."""
        self._link.close()

    def hear_out(self, quiet_s: float) -> None:
        """Receive what a dead source has sent, until nothing has come for ``quiet_s``.

        Its kernel may keep the link open for long, and its last outputs may still arrive.
        """

        def listen(until_s: float) -> None:
            with contextlib.suppress(LinkError):
                while self._link.quiet_s < until_s:
                    self._thread.join(LOOK_S)
                self._link.receive_no_more()

        if self._ended is not None:
            return
        try:
            threading.Thread(
                target=listen, args=(quiet_s,), name="tmd-shadow-last", daemon=True
            ).start()
        except RuntimeError:
            listen(0.0)  # do not wait for what may still arrive

    def spoil(self) -> None:
        """Close and discard all frames: the current step is void."""
        self.close()
        with self._arrived:
            self.starved = True
            self._arrived.notify_all()

    def end(self) -> None:
        """Close, and wait for a limited time for the thread."""
        self.close()
        if self._thread.ident is not None:
            self._thread.join(ENDING_S)

    @property
    def lost(self) -> LinkError:
        """Why nothing more will arrive."""
        return self._ended or LinkError("the shadow has lost its rank")

    # --- state: main thread -----------------------------------------------------------------------

    def next_state(self) -> Arrival:
        """Wait for the next frame about the state.

        Raises:
            LinkError: the link has ended and all its frames were taken.
        """
        with self._arrived:
            while not self._state:
                if self._ended is not None:
                    raise self._ended
                self._arrived.wait()
            arrival = self._state.popleft()
            self._waiting -= _size(arrival)
            return arrival

    def checks(self) -> list[tuple[int, Digest]]:
        """Digests of the source that wait to be used; they remain."""
        with self._arrived:
            found = [a.frame for a in self._state if isinstance(a.frame, DigestCheck)]
        return [(frame.step, frame.parts) for frame in found]

    def records(self, step: int, seconds: float) -> bool:
        """Whether all of ``step`` has arrived, with a later digest, so that it needs no link.

        Waits up to ``seconds`` unless crowded. Raises LinkError if the step can never be complete.
        """

        def decided() -> bool:
            return self._has_whole(step) or self.is_crowded or self._ended is not None

        with self._arrived:
            self._arrived.wait_for(decided, seconds)
            whole = self._has_whole(step)
            if self._ended is not None and not whole:
                raise self._ended
            return whole

    @property
    def is_crowded(self) -> bool:
        """Whether at least half of the allowed bytes wait, so that they should be used now."""
        return self._waiting > self._bound / 2

    def _has_whole(self, step: int) -> bool:
        """A step with a digest may be incomplete: outputs may follow the next step's boundary."""
        frames_here = [a.frame for a in self._state]
        shown = [f.step for f in frames_here if isinstance(f, DigestCheck) and f.step > step]
        whole = [f.step for f in frames_here if isinstance(f, Boundary) and f.quiet]
        return bool(shown and whole) and min(shown) <= max(whole)

    def put_back(self, arrival: Arrival) -> None:
        """Return a frame, to be taken later."""
        with self._arrived:
            self._waiting += _size(arrival)
            self._state.appendleft(arrival)

    def newest_boundary(self) -> int | None:
        """Highest step of a waiting boundary."""
        with self._arrived:
            steps = [a.frame.step for a in self._state if isinstance(a.frame, Boundary)]
        return steps[-1] if steps else None

    def forget_before(self, step: int) -> None:
        """Discard outputs of steps before ``step``."""
        with self._arrived:
            for name, queue in list(self._channels.items()):
                while queue and queue[0][0] < step:
                    self._waiting -= _size(queue.popleft()[1])
                self._tidy(name)

    # --- outputs: the threads of the script's groups, and the vote --------------------------------

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Fill ``outputs`` with the source's. Raises LinkError if the link ended before them, or if
        this worker computes something else: see ``mismatch``."""
        if op == "send":
            return
        arrival = self._take(group)
        frame, values = arrival.frame, arrival.tensors
        theirs = frame.op if isinstance(frame, Output) else type(frame).__name__
        here, there = _shown(outputs), _shown(values)
        if (theirs, there) != (op, here):
            raise self._differs(
                f"the script calls different collectives: {op} {here} here, {theirs} {there} there "
                f"({CALLS_ALL})"
            )
        given = frame.given if isinstance(frame, Output) else ""
        if given and given != digest_of_inputs(op, inputs):
            raise self._differs(
                f"this worker's inputs of {op} of {here} differ from those of its rank"
            )
        for out, value in zip(outputs, values, strict=True):
            out.data.copy_(value)

    def vote(self, values: Sequence[int]) -> tuple[int, ...]:
        """The result of the source's vote. Raises LinkError if there was none."""
        payload = self._said(VOTE)
        return tuple(msgpack.decode(payload, type=list[int]))

    def shift(self, payload: bytes, offset: int) -> bytes:
        """What the source received in a shift. Raises LinkError if there was none."""
        return self._said(f"{SHIFT}{offset}")

    def _said(self, name: str) -> bytes:
        try:
            frame = self._take(name).frame
        except LinkError:
            self.spoil()
            raise
        if not isinstance(frame, ControlMessage):
            raise LinkError(f"unexpected {type(frame).__name__} in {name}")
        return frame.payload

    def _take(self, name: str) -> Arrival:
        with self._arrived:
            while not (self.starved or self._ended or self._channels.get(name)):
                self._arrived.wait()
            if self.starved or not self._channels.get(name):
                raise self.lost
            _, arrival = self._channels[name].popleft()
            self._waiting -= _size(arrival)
            self._tidy(name)
            return arrival

    def _tidy(self, name: str) -> None:
        """Remove empty channels, since a script may use a new tag for each message."""
        if not self._channels[name]:
            del self._channels[name]

    def _differs(self, how: str) -> LinkError:
        with self._arrived:
            if not self.starved:  # a void step proves nothing
                self.mismatch, self.starved = how, True
                self._arrived.notify_all()
        return LinkError(how)

    # --- reader -----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                frame, tensors = frames.receive(self._link)
                self._sort(Arrival(frame, tensors, time.monotonic()))
        except LinkError as error:
            with self._arrived:
                self._ended = error
                self._arrived.notify_all()
        finally:
            self._link.close()

    def _sort(self, arrival: Arrival) -> None:
        frame = arrival.frame
        with self._arrived:
            self._waiting += _size(arrival)
            match frame:
                case Output() | ControlMessage():
                    queue = self._channels.setdefault(frame.channel, deque())
                    queue.append((self._stream_step, arrival))
                case Dropped():
                    raise ShadowLost(frame.reason, final=frame.final)
                case _:
                    if isinstance(frame, Boundary):
                        self._stream_step = frame.step
                        self.evaluations.boundary(arrival.at, evaluates=bool(frame.position.due))
                    self._state.append(arrival)
            self._arrived.notify_all()
        if self._waiting > self._bound:
            raise ShadowLost(
                "this worker does not keep up: too many bytes wait to be used", final=True
            )


class ShadowLost(LinkError):
    """The source has ended the shadow. ``final``: its state should not be copied either."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class Overdue(LinkError):
    """This worker cannot keep up or cannot shadow at all, though it may be sound."""


class CopyInstead(LinkError):
    """Neither outputs nor gradients lead this worker to the rank's state: it has to be copied."""


class Differs(StateMismatch):
    """This worker computes other bits than the rank that it shadows."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(
            f"this worker computes other bits than rank {rank}: {what}; first check for state that "
            "session.register() does not know, for batches or random numbers that do not come from "
            "the session, for a branch by rank or host, and for different versions of libraries; "
            "then check the memory and processor of this machine"
        )


def _shown(tensors: Sequence[Tensor]) -> str:
    shown = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
    return ", ".join(shown) or "nothing"


def _size(arrival: Arrival) -> int:
    """Bytes that count as waiting; a unit counts as none, since it is used at once."""
    return 0 if isinstance(arrival.frame, Unit) else sum(t.nbytes for t in arrival.tensors)
