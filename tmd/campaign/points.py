"""Faults at exact points inside a training process, and proof that they were reached.

A fault is ``<point>@<who>:<step>=<what>``. Each point wraps the function where the event occurs:
"in the vote" or "while the state is copied" is a place in the code. A fault that strikes leaves a
file ``<folder>/<id>.fired``. ``wait`` then holds until ``<id>.go`` appears, and ``pace`` slows each
further step at the point until then. The id is the point's name, or, for a fault ordered while the
job runs, the first word of its line in ``orders``.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

import tmd.fabric
from tmd.campaign import fault_actions
from tmd.campaign.environment import FAULTS, FOLDER, ORDERS, RELAY
from tmd.core.values.model import Member
from tmd.fabric.collectives.op import Op
from tmd.fabric.dial import Caller
from tmd.fabric.frame import FrameKind
from tmd.fabric.generations.gloo import GlooKind
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.generations.passing import PassingGroup
from tmd.fabric.generations.ring import RingKind
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.runner import Runner
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import SHIFT
from tmd.trainer.session.loop import BatchLoop
from tmd.trainer.session.session import Session
from tmd.trainer.shadow.planned import PlannedSession
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.shadow.source import ShadowSource
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state.units import Units
from tmd.trainer.state_transfer import early_digest, stream, verification
from tmd.trainer.state_transfer.transfer import StateTransfer
from tmd.trainer.worker.arming import Arming
from tmd.trainer.worker.continuation import Continuation
from tmd.trainer.worker.leaving import Leaving
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.shadow_driver import ShadowDriver

PACES_S = {"pace": 0.05, "crawl": 0.4}
"""By how much a step is longer: in a long job, and in one with few steps until its next fault."""
LOOK_S = 0.005


class ArmedFault(NamedTuple):
    """``who`` is a rank, a host, or ``*`` for the first process. ``step`` is ``*`` for any, and
    ``+`` for any in which the process holds the rank."""

    id: str
    point: str
    who: str
    step: str
    what: str

    @classmethod
    def parse(cls, text: str) -> ArmedFault:
        head, what = text.split("=")
        name, _, place = head.rpartition(" ")
        point, where = place.split("@")
        who, step = where.split(":")
        return cls(name or point, point, who, step, what)


class Injector:
    """Strikes this process. Does nothing unless the environment names a folder."""

    def __init__(self) -> None:
        self._faults = [ArmedFault.parse(t) for t in os.environ.get(FAULTS, "").split(",") if t]
        self._folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
        self._host = os.environ.get("TMD_WORKER", "").partition("/")[0]
        self._ordered: list[ArmedFault] = []
        self._orders_of: tuple[int, int, int] | None = None
        self._session: Session | None = None
        self._fabric: tmd.fabric.Fabric | None = None
        self._following: ShadowSession | None = None
        self._flips: ArmedFault | None = None
        self._cuts = False
        self._link: tmd.fabric.Link | None = None
        """Is about to carry the state of a rank, or has."""
        self._has_sent: tmd.fabric.Link | None = None
        """Has carried it, but for the answer of the joiner."""
        self._paced: ArmedFault | None = None
        self._broadcasts = (-1, 0)
        """The current step, and the number of its broadcasts so far."""
        self._mirrored = -1
        """The step whose frames are sent to the standby."""

    def follow(self, session: Session) -> None:
        """Follow rank and step of ``session``, and wrap the points inside the runtime."""
        self._session = session
        if self._folder is None:
            return
        if RELAY in os.environ:
            _relay(os.environ[RELAY], self._host)
        _before(BatchLoop, "run", lambda *_: self.reach("loop"))
        _before(tmd.fabric.Fabric, "reduce_min", self._before_vote)
        _after(tmd.fabric.Fabric, "reduce_min", lambda *_: self.reach("after-vote"))
        _after(Op, "swap", self._in_vote)
        _before(Runner, "_communicate", self._communicating)
        _before(RankMigration, "prepare", lambda *_: self.reach("preparing"))
        _before(StateTransfer, "_meet", lambda *_: self.reach("prepared"))
        _before(stream, "receive_tensors", lambda *_: self.reach("receiving"))
        _before(stream, "send_tensors", self._sending_state)
        _before(stream, "_expect_go", self._awaiting_answer)
        _before(Units, "place", lambda *_: self.reach("copying"))
        _before(ShadowSession, "_follow", lambda *_: self.reach("tail"))
        _before(PlannedSession, "_report_step", lambda *_: self.reach("following"))
        _before(ShadowSession, "computed", self._shadowing)
        _before(ShadowDriver, "_take", lambda *_: self.reach("taking"))
        _before(early_digest._Work, "_run", lambda work: self.reach(f"comparing-{work.step}"))
        _before(verification._Comparison, "_run", lambda *_: self.reach("proving"))
        _before(frames, "send", self._sending)
        self._stand_at_checkpoints()
        _before(Snapshots, "put_back", lambda *_: self.reach("putting-back"))
        _before(Arming, "arm", lambda *_: self.reach("arming"))
        _before(ShadowSource, "_next_unit", lambda *_: self.reach("showing"))
        _before(ShadowSource, "output", lambda *_: self.reach("mirroring"))
        _before(RingKind, "build", self._building)
        _before(GlooKind, "build", self._building)
        _before(PassingGroup, "_pass", lambda *_: self.reach("passing"))
        _before(Recovery, "rejoin", lambda *_: self.reach("synced"))
        _before(Continuation, "_enters", lambda *_: self.reach("finishing"))
        _before(Leaving, "carry_out", lambda *_: self.reach("switching"))
        _before(Leaving, "wait", lambda *_: self.reach("left"))

    def _stand_at_checkpoints(self) -> None:
        """Wrap the points inside a part, with half of it on disk, at its end, and before a rank
        restores its own, once the script has set up checkpoints."""

        def _asked(session: Session, *_: object) -> None:
            from tmd.trainer.checkpoints import archive
            from tmd.trainer.checkpoints.saving import Saving

            _before(Saving, "go_on", lambda *_: self.reach("restoring"))
            _after(archive, "_write", lambda _, staged: self.reach(f"writing-{staged.step}"))
            _before(archive, "join_parts", lambda _, step, *__: self.reach(f"joining-{step}"))

        _after(Session, "checkpoint", _asked)

    def reach(self, point: str) -> None:
        """Report that the process is at ``point``."""
        session, folder = self._session, self._folder
        if session is None or folder is None:
            return
        if self._paced is not None and point == self._paced.point and not self._gone(self._paced):
            time.sleep(PACES_S[self._paced.what])
        self._read_orders(folder)
        for fault in (*self._faults, *self._ordered):
            meant = fault.point == point and self._is_meant(fault, session)
            if meant and self._can_strike(fault.what) and self._first(fault.id):
                self._strike(fault)

    def work(self, seconds: float) -> None:
        """Be busy for ``seconds``, as a device is; a shadow is not, since it must catch up."""
        if seconds and self._session is not None and not self._session.shadowing:
            time.sleep(seconds)

    def linger(self, seconds: float, last: int) -> None:
        """Extend each step by ``seconds``, and wait at step ``last`` until hurried, so that the job
        runs until the next fault. Shadows are exempt, since they must catch up."""
        session, folder = self._session, self._folder
        if session is None or folder is None or session.shadowing or not seconds:
            return
        hurry = folder / "hurry.go"
        if not hurry.exists():
            time.sleep(seconds)
        while session.step_number >= last and not hurry.exists():
            time.sleep(LOOK_S)

    def _is_meant(self, fault: ArmedFault, session: Session) -> bool:
        who = fault.who in ("*", str(session.rank), self._host)
        when = fault.step in ("*", "+", str(session.step_number))
        return who and when and (fault.step == "*" or not session.shadowing)

    def _read_orders(self, folder: Path) -> None:
        try:
            found = os.stat(folder / ORDERS)
        except FileNotFoundError:
            return
        # Two files may be written within one tick of the kernel's clock.
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        if version != self._orders_of:
            lines = (folder / ORDERS).read_text().splitlines()
            self._ordered = [ArmedFault.parse(line) for line in lines]
            self._orders_of = version

    def _building(self, kind: object, request: GroupRequest) -> None:
        self.reach(f"building-{request.membership.epoch}")

    def _before_vote(self, fabric: tmd.fabric.Fabric, *_: object) -> None:
        self._fabric = fabric
        self.reach("before-vote")

    def _in_vote(self, op: Op, *_: object) -> None:
        if threading.current_thread() is threading.main_thread() and op.size > 1:
            self.reach("in-vote")

    def _communicating(self, runner: Runner, call: CollectiveCall, *_: object) -> None:
        """Operations of a group run one after the other, in their own thread."""
        if call.kind is FrameKind.BROADCAST and self._session is not None:
            step, count = self._session.step_number, self._broadcasts[1]
            number = count if self._broadcasts[0] == step else 0
            self._broadcasts = (step, number + 1)
            self.reach(f"broadcast-{number}")

    def _shadowing(self, following: ShadowSession, *_: object) -> None:
        self._following = following
        if self._flips is not None and not self._gone(self._flips):
            fault_actions.flip(following)
        if self._cuts:
            following.shadow.close()
        self.reach("shadowing")

    def _sending_state(self, link: tmd.fabric.Link, *_: object) -> None:
        self._link = link
        self.reach("sending")
        self._link, self._has_sent = None, link

    def _awaiting_answer(self, link: tmd.fabric.Link) -> None:
        """The joiner has the state, has said so, and has closed the link. An earlier answer is to
        the header."""
        if link is self._has_sent:
            self._link, self._has_sent = link, None
            closed = select.poll()
            closed.register(link.sock, select.POLLRDHUP)
            closed.poll()
            self.reach("sent")
            self._link = None

    def _sending(self, link: object, envelope: frames.Envelope, *_: object) -> None:
        """A frame is about to be sent: the second unit of a snapshot, which is its middle, or what
        a rank got in a shift, on the way to its standby."""
        match threading.current_thread().name, envelope.frame:
            case "tmd-snapshots", frames.Unit(version=version, number=1):
                self.reach(f"bringing-{version}")
            case "tmd-mirror-out", frames.Boundary(step=step):
                self._mirrored = step
            case "tmd-mirror-out", frames.ControlMessage(channel=name) if name.startswith(SHIFT):
                # This thread may be a step behind the script.
                self.reach(f"telling-{self._mirrored}")

    def _first(self, name: str) -> bool:
        """Whether this process is the first: each fault strikes once in the whole job."""
        assert self._folder is not None
        try:
            (self._folder / f"{name}.fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _gone(self, fault: ArmedFault) -> bool:
        assert self._folder is not None
        return (self._folder / f"{fault.id}.go").exists()

    def _can_strike(self, what: str) -> bool:
        """Whether there is what the fault breaks: it counts as fired once it strikes."""
        match what:
            case "sever" | "isolate":
                return self._fabric is not None
            case "cut" if self._link is not None:
                return True
            case "flip" | "flips" | "cut" | "cuts":
                return self._following is not None
            case _:
                return True

    def _strike(self, fault: ArmedFault) -> None:
        match fault.what:
            case "sever":
                assert self._fabric is not None
                fault_actions.sever(self._fabric)
            case "flip" | "flips":
                # "flips": after every step, since a copy would repair a single flip.
                assert self._following is not None
                self._flips = fault if fault.what == "flips" else None
                fault_actions.flip(self._following)
            case "isolate":
                assert self._fabric is not None
                fault_actions.isolate(self._fabric)
            case "cut" if self._link is not None:
                self._link.close()
            case "cut" | "cuts":
                # "cuts": after every step.
                assert self._following is not None
                self._cuts = fault.what == "cuts"
                self._following.shadow.close()
            case "pace" | "crawl":
                self._paced = fault
            case "wait":
                while not self._gone(fault):
                    time.sleep(LOOK_S)
            case plain:
                fault_actions.strike(plain)


def _relay(ports: str, host: str) -> None:
    """Dial every peer through the campaign's relay."""
    inner = Caller._talk

    def talk(caller: Caller, member: Member, *more: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as question:
            question.connect(ports)
            question.sendall(f"{host} {member.host} {member.address}\n".encode())
            port = question.makefile().readline().strip()
        return inner(caller, structs.replace(member, address=f"127.0.0.1:{port}"), *more)

    Caller._talk = talk  # type: ignore[method-assign, assignment]


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, act: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        act(*args)
        return result

    setattr(owner, name, wrapped)
