"""Watches the kernel log for what the NVIDIA driver tells of its GPUs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from tmd.plugin import Detector, DetectorConfig, DetectorContext, Severity, Signal, State

from . import kernellog, memory, table
from .findings import Findings
from .lines import PREFIX, Fault, Reader
from .records import KERNEL, parse

LOST = "xid.log_lost"
NOT_KEPT = "xid.place_not_kept"
FLUSH_S = 1.0
"""Repeats are told, and the place in the log is kept, at most so often."""
IDLE_KEEP_S = 30.0
_MARK = PREFIX.strip().encode()


class XidConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    source: str = str(kernellog.PLACE)
    """Where the kernel log is read: what gives one record of /dev/kmsg with each read, so also a
    named pipe that is written with O_DIRECT. Whoever may write there can fake any fault."""
    table: str = ""
    """File that stands instead of the shipped table; the same format."""
    quiet_s: float = 600.0
    """What moves nothing is over when it was not seen for so long."""
    facilities: tuple[int, ...] = (KERNEL,)
    """Syslog facilities whose lines count. User space cannot write facility 0; naming another one
    lets whoever may write /dev/kmsg fake any fault, and is for tests only."""


class XidDetector(Detector):
    name: ClassVar[str] = "xid"
    Config: ClassVar[type[DetectorConfig]] = XidConfig

    def __init__(self, open_log: Callable[[Path], int] = kernellog.open_log) -> None:
        self._open = open_log

    def supported(self) -> str | None:
        return self.supported_with(XidConfig())

    def supported_with(self, config: DetectorConfig) -> str | None:
        assert isinstance(config, XidConfig)
        try:
            kernellog.KernelLog(self._open(Path(config.source))).close()
        except PermissionError:
            return (
                f"{config.source} may not be read: "
                "with kernel.dmesg_restrict=1 the daemon needs CAP_SYSLOG"
            )
        except OSError as error:
            return f"{config.source} cannot be opened: {error.strerror}"
        return None

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, XidConfig)
        known = table.load(config.table or None)
        follower = Follower(config, known, ctx.state_dir / "xid.json", ctx.now())
        log = kernellog.KernelLog(self._open(Path(config.source)))
        try:
            for signal in follower.findings.restated():
                yield signal
            while True:
                await log.wait(FLUSH_S)
                for raw in log.batch():
                    for signal in follower.take(raw, ctx.now()):
                        yield signal
                for signal in follower.period(ctx.now(), log.overwritten):
                    yield signal
        finally:
            log.close()
            with suppress(OSError):  # a full disk must not keep the daemon from stopping
                follower.keep()


class Follower:
    """Carries the log into the findings and remembers how far it came."""

    def __init__(self, config: XidConfig, known: table.Table, file: Path, now: float) -> None:
        self._config = config
        self._file = file
        self._boot = kernellog.boot_id()
        kept = memory.recall(file, self._boot)
        self.findings = Findings(known, kept, now)
        self._sequence = kernellog.Sequence(kept.seq)
        self._reader = Reader()
        self._flushed = self._kept = now
        self._judged = False
        """A line was judged since the place was kept."""
        self._problem = ""
        self._told_lost = 0
        self._lost_at = now

    def take(self, raw: bytes, now: float) -> Iterator[Signal]:
        """One record of the log."""
        record = parse(raw)
        if record is None or not self._sequence.new(record.seq):
            return
        if _MARK not in raw or record.facility not in self._config.facilities:
            return
        fault: Fault | None = self._reader.take(record.text, record.at)
        if fault is not None:
            self._judged = True
            yield from self.findings.observe(fault, now)

    def period(self, now: float, overwritten: int) -> Iterator[Signal]:
        """What is told and kept once a period."""
        if now - self._flushed < FLUSH_S:
            return
        self._flushed = now
        yield from self.findings.flush()
        yield from self.findings.quiet(now, self._config.quiet_s)
        yield from self._lost(now, overwritten)
        if self._judged or now - self._kept > IDLE_KEEP_S:
            self._kept = now
            yield from self._try_to_keep()

    def keep(self) -> None:
        """Lines that were judged are not judged again after a restart."""
        memory.keep(self._file, self.findings.memory(self._boot, self._sequence.last))
        self._judged = False

    def _try_to_keep(self) -> Iterator[Signal]:
        try:
            self.keep()
            problem = ""
        except OSError as error:
            problem = f"after a restart XIDs will be told again: {self._file}: {error.strerror}"
        if bool(problem) != bool(self._problem):
            state = State.RAISED if problem else State.CLEARED
            yield Signal(NOT_KEPT, "host", Severity.WARNING, state, problem)
        self._problem = problem

    def _lost(self, now: float, overwritten: int) -> Iterator[Signal]:
        lost = self._sequence.lost
        quiet = now - self._lost_at >= self._config.quiet_s
        if lost == self._told_lost and not (self._told_lost and quiet):
            return
        more, self._told_lost = lost - self._told_lost, lost
        if more:
            self._lost_at = now
        elif quiet:
            self._sequence.lost = self._told_lost = 0
        yield Signal(
            code=LOST,
            entity="host",
            severity=Severity.WARNING,
            state=State.RAISED if more else State.CLEARED,
            message=f"{lost} records of the kernel log were overwritten before they were read",
            evidence=(f"found {overwritten} times by the read itself",),
            count=max(more, 1),
        )
