"""Faults at exact points inside a training process, and proof that they were reached.

A fault is ``<point>@<who>:<step>=<what>``. Points wrap the one function where the thing happens, so
that "in the vote" or "while the state is copied" is a place and not a moment on a clock. Reaching a
point leaves a file ``<folder>/<point>.fired``; ``wait`` then holds until ``<point>.go`` appears,
and ``pace`` makes each further step that comes by there a slow one until it does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tmd.fabric
from tmd.fabric.collectives.op import Op
from tmd.trainer import frames, transfer
from tmd.trainer.arming import Arming
from tmd.trainer.carrier import Carrier
from tmd.trainer.coordinator import Coordinator
from tmd.trainer.following import Following
from tmd.trainer.handover import Handover
from tmd.trainer.mirror import Mirror
from tmd.trainer.session import Session
from tmd.trainer.shadowing import Shadowing
from tmd.trainer.snapshots import Snapshots
from tmd.trainer.units import Units

PACE_S = 0.05


class Fault(NamedTuple):
    """``who`` is a rank, or ``*`` for the first to get there; ``step`` is ``*`` for any."""

    point: str
    who: str
    step: str
    what: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        place, what = text.split("=")
        point, where = place.split("@")
        who, step = where.split(":")
        return cls(point, who, step, what)


class Injector:
    """Armed from the environment: ``TMD_TEST_FAULTS`` (comma-separated), ``TMD_TEST_FOLDER``."""

    def __init__(self) -> None:
        texts = [t for t in os.environ.get("TMD_TEST_FAULTS", "").split(",") if t]
        self._faults = [Fault.parse(t) for t in texts]
        self._folder = Path(os.environ.get("TMD_TEST_FOLDER", "."))
        self._session: Session | None = None
        self._fabric: tmd.fabric.Fabric | None = None
        self._following: Following | None = None
        self._flips = False
        self._cuts = False
        self._paced = ""

    def follow(self, session: Session) -> None:
        """Know rank and step, and stand at the points inside the runtime."""
        self._session = session
        _before(tmd.fabric.Fabric, "reduce_min", self._before_vote)
        _after(tmd.fabric.Fabric, "reduce_min", lambda *_: self.reach("after-vote"))
        _after(Op, "swap", self._in_vote)
        _before(Handover, "prepare", lambda *_: self.reach("preparing"))
        _before(Carrier, "_meet", lambda *_: self.reach("prepared"))
        _before(transfer, "receive_tensors", lambda *_: self.reach("receiving"))
        _before(transfer, "send_tensors", lambda *_: self.reach("sending"))
        _before(Units, "place", lambda *_: self.reach("copying"))
        _before(Following, "_follow", lambda *_: self.reach("tail"))
        _before(Following, "computed", self._shadowing)
        _before(Shadowing, "_take", lambda *_: self.reach("taking"))
        _before(frames, "send", self._sending)
        _before(Snapshots, "put_back", lambda *_: self.reach("putting-back"))
        _before(Arming, "arm", lambda *_: self.reach("arming"))
        _before(Mirror, "_next_unit", lambda *_: self.reach("showing"))
        _before(Mirror, "output", lambda *_: self.reach("mirroring"))
        _before(Coordinator, "_synced", lambda *_: self.reach("synced"))
        _before(Coordinator, "_left", lambda *_: self.reach("left"))

    def reach(self, point: str) -> None:
        """The process is at ``point`` now."""
        session = self._session
        if session is None:
            return
        if point == self._paced and not (self._folder / f"{point}.go").exists():
            time.sleep(PACE_S)
        for fault in self._faults:
            if (
                fault.point == point
                and fault.who in ("*", str(session.rank))
                and fault.step in ("*", str(session.step_number))
                and not (session.shadowing and fault.step != "*")
                and self._first(point)
            ):
                self._strike(fault)

    def _before_vote(self, fabric: tmd.fabric.Fabric, *_: object) -> None:
        self._fabric = fabric
        self.reach("before-vote")

    def _in_vote(self, op: Op, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and op.size > 1:
            self.reach("in-vote")

    def _shadowing(self, following: Following, *_: object) -> None:
        self._following = following
        if self._flips:
            self._flip()
        if self._cuts:
            self._cut()
        self.reach("shadowing")

    def _sending(self, link: object, envelope: frames.Envelope, *_: object) -> None:
        """A frame is on its way; of a snapshot it is the second unit that counts: it is half."""
        frame = envelope.frame
        ours = threading.current_thread().name == "tmd-snapshots"
        if ours and isinstance(frame, frames.Unit) and frame.number == 1:
            self.reach(f"bringing-{frame.version}")

    def _first(self, point: str) -> bool:
        """Each fault strikes once in the whole job, whoever gets there."""
        try:
            (self._folder / f"{point}.fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        match fault.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError("injected error in user code")
            case "sever":
                self._sever()
            case "flip":
                # From here on after every step: a copy of the state would make good a single one.
                self._flips = True
                self._flip()
            case "cut":
                self._cut()
            case "cuts":
                # From here on after every step.
                self._cuts = True
                self._cut()
            case "pace":
                self._paced = fault.point
            case "wait":
                while not (self._folder / f"{fault.point}.go").exists():
                    time.sleep(0.005)
            case other:
                raise ValueError(f"unknown fault {other!r}")

    def _flip(self) -> None:
        """One bit of one parameter, as a sick memory would."""
        assert self._following is not None
        param = self._following._units.params[0]
        param.detach().view(-1).view(torch.int32)[:1].bitwise_xor_(1)

    def _cut(self) -> None:
        """The link to the rank that is followed breaks."""
        assert self._following is not None
        self._following.shadow.close()

    def _sever(self) -> None:
        """Break one link of the present epoch, as a network would."""
        assert self._fabric is not None
        standing = self._fabric.standing
        assert standing is not None
        _, link = next(iter(standing.member_links()))
        link.sever()


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return inner(*args, **kwargs)

    _put(owner, name, wrapped)


def _after(owner: Any, name: str, act: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        act(*args)
        return result

    _put(owner, name, wrapped)


def _put(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, wrapped)
    # The table of handlers holds the functions themselves.
    from tmd.trainer import coordinator

    for activity, handler in coordinator.HANDLERS.items():
        if handler is inner:
            coordinator.HANDLERS[activity] = wrapped
