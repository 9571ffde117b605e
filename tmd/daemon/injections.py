"""Findings that operators inject: checked, raised through the watcher, cleared when they expire.

They take the same path as a detector's signals. A restart of the daemon clears the findings that
were injected before it, since nothing else would.
"""

from __future__ import annotations

import asyncio
import pwd
import time
from pathlib import Path

import structlog
from msgspec import Struct, structs

from tmd import wire
from tmd.core.alerts.findings import FindingKey, Origin
from tmd.core.alerts.injection import (
    MOST,
    detector_of,
    foretold,
    forgetful,
    injector,
    marked,
    refusal,
    standing,
    unended,
)
from tmd.core.values.model import Signal, State, Strategy
from tmd.daemon.bus import WakeEvent
from tmd.daemon.journal import Journal
from tmd.daemon.roster import Roster
from tmd.daemon.watcher import Watcher

log = structlog.get_logger("tmd.injections")

IDLE_S = 3600.0


class Peer(Struct, frozen=True):
    """The client, as the kernel reports it."""

    pid: int
    uid: int

    def __str__(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return f"user {self.uid}"


class Injections:
    """Answers operators for one host; :meth:`run` clears findings that have expired.

    Args:
        enabled: whether anything may be injected.
        file: the file that holds the switch, named when an injection is refused.
    """

    def __init__(
        self,
        host: str,
        enabled: bool,
        file: Path | None,
        watcher: Watcher,
        roster: Roster,
        journal: Journal,
    ) -> None:
        self._host = host
        self._enabled = enabled
        self._file = file
        self._watcher = watcher
        self._roster = roster
        self._journal = journal
        self._ends: dict[FindingKey, float] = {}
        """When each expires, by the loop's clock."""
        self._changed = WakeEvent()

    async def run(self) -> None:
        """Run until cancelled."""
        await self._end_of_last_run()
        while True:
            now = asyncio.get_running_loop().time()
            for key in [key for key, end in self._ends.items() if end <= now]:
                self._end(key, "it has expired")
            await self._changed.wait(min([*self._ends.values(), now + IDLE_S]) - now)

    def adopt(self, enabled: bool) -> None:
        """Take over the switch; switching it off clears what is injected."""
        self._enabled = enabled
        if not enabled:
            for key in standing(self._watcher.board):
                self._end(key, "injection was switched off")

    def answer(self, request: wire.Request, peer: Peer) -> wire.Message:
        """The answer to an operator's request."""
        match request:
            case wire.Inject():
                return self._inject(request, peer)
            case wire.Withdraw():
                return self._withdraw(request, peer)

    def _inject(self, request: wire.Inject, peer: Peer) -> wire.Message:
        signal, terms = request.signal, self._watcher.terms()
        problem = refusal(signal, request.for_s, terms)
        off = "" if self._enabled else self._off()
        if problem or (off and not request.dry_run):
            log.warning("injection refused", code=signal.code, by=str(peer), reason=problem or off)
            return wire.Rejected(problem or off)
        strategy, rules = terms[detector_of(signal.code)]
        origin = Origin(self._host, injector(detector_of(signal.code)), strategy, forgetful(rules))
        key = FindingKey(self._host, origin.detector, signal.entity, signal.code)
        if key not in (others := standing(self._watcher.board)) and len(others) >= MOST:
            return wire.Rejected(f"{MOST} findings are injected on {self._host}: clear some first")
        jobs = {status.worker: status.job for status in self._roster.statuses}
        signal = structs.replace(signal, job=jobs.get(signal.entity, ""))
        signal = marked(signal, str(peer), request.for_s)
        alert = foretold(self._watcher.board, signal, origin, now=time.time())
        if not request.dry_run:
            log.warning(
                "finding injected",
                code=signal.code,
                entity=signal.entity,
                severity=signal.severity.value,
                strategy=strategy.value,
                for_s=request.for_s,
                **_audited(peer),
            )
            self._watcher.fold(signal, origin.detector, strategy, origin.rules)
            self._ends.pop(key, None)
            if request.for_s:
                self._ends[key] = asyncio.get_running_loop().time() + rules.hold_s + request.for_s
            self._changed.ring()
            alert = self._watcher.board.raised.get(key, alert)
        return wire.Injected((alert,), hold_s=rules.hold_s, off=off)

    def _withdraw(self, request: wire.Withdraw, peer: Peer) -> wire.Message:
        found = standing(self._watcher.board, request.code, request.entity)
        ended = [alert for key, alert in self._watcher.board.raised.items() if key in found]
        for key in found:
            log.warning(
                "injected finding withdrawn", code=key.code, entity=key.entity, **_audited(peer)
            )
            self._end(key, f"cleared by {peer}")
        if not found:
            return wire.Rejected(f"no matching finding is injected on {self._host}")
        return wire.Injected(tuple(structs.replace(a, state=State.CLEARED) for a in ended))

    def _end(self, key: FindingKey, why: str) -> None:
        self._ends.pop(key, None)
        severity = standing(self._watcher.board).get(key)
        if severity is None:  # an operator has declared the host healthy
            return
        log.info("injected finding ends", code=key.code, entity=key.entity, reason=why)
        over = Signal(key.code, key.entity, severity, State.CLEARED, f"injection: {why}")
        self._watcher.fold(over, key.detector, Strategy.OBSERVE)

    def _off(self) -> str:
        where = f"in {self._file}" if self._file else "in its configuration (TMD_INJECT__ENABLED)"
        return (
            f"injection is disabled on {self._host}: set [inject] enabled = true {where}, "
            "then 'systemctl reload tmd'"
        )

    async def _end_of_last_run(self) -> None:
        left = unended(await self._journal.injected())
        # Findings injected while the journal was read do not belong to the last run.
        new = {alert.id for alert in self._watcher.board.alerts}
        left = [alert for alert in left if alert.id not in new]
        for alert in left:
            log.info("injected finding ends", code=alert.code, reason="the daemon was restarted")
        now, why = time.time(), "injection: the daemon was restarted"
        self._watcher.publish(
            tuple(structs.replace(a, state=State.CLEARED, message=why, at=now) for a in left)
        )


def _audited(peer: Peer) -> dict[str, object]:
    return {"by": str(peer), "uid": peer.uid, "pid": peer.pid}
