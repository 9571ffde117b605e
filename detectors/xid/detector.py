"""Receives faults of GPUs and NVSwitches from the kernel log and from NVML events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from msgspec import structs

from tmd.plugin import (
    Detector,
    DetectorConfig,
    DetectorContext,
    NotNegative,
    Positive,
    Severity,
    Signal,
    State,
    boot_id,
    os_reason,
    readable,
)

from .. import kept
from ..trouble import Trouble
from . import events, kernellog, sxids, table
from .findings import XidFindings
from .lines import LOST_TEXT, PREFIX, XidLine, XidLineReader
from .memory import XidMemory
from .merge import MERGE_S, Merge, fault
from .records import KERNEL, parse
from .switches import Switches
from .switchlines import MARK, read
from .xid_event import XidEvent

LOST = "xid.log_lost"
NOT_KEPT = "xid.place_not_kept"
NO_EVENTS = "xid.no_events"
NO_LOG = "xid.no_log"
SWITCHES = Path("/proc/driver/nvidia-nvswitch/devices")
"""Has an entry for each NVSwitch. Their faults are in the kernel log alone."""
FLUSH_S = 1.0
"""Shortest interval for reporting repeats and saving the position in the log."""
IDLE_KEEP_S = 30.0
_MARKS = (PREFIX.strip().encode(), LOST_TEXT.encode(), MARK.encode())


class XidConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    source: str = str(kernellog.PLACE)
    """The kernel log. Each read returns one record of /dev/kmsg; a named pipe written with O_DIRECT
    also works. Any process that may write to such a pipe can fake any fault."""
    table: str = ""
    """A file that replaces the shipped table; the same format."""
    sxid_table: str = ""
    """A file that replaces the table of NVSwitch errors."""
    events: Literal["auto", "always", "never"] = "auto"
    """When to use NVML's XID events: if the log cannot be read, always, or never. They are received
    by a process of its own, of 8 MB."""
    events_deadline_s: Positive = 30.0
    """A driver that does not answer for this long counts as hung."""
    quiet_s: NotNegative = 600.0
    """Findings that move no rank clear after this long."""
    facilities: tuple[int, ...] = (KERNEL,)
    """Syslog facilities whose lines count. User space cannot write facility 0; any other lets every
    process that may write /dev/kmsg fake a fault, and is for tests only."""


class XidDetector(Detector):
    name: ClassVar[str] = "xid"
    Config: ClassVar[type[DetectorConfig]] = XidConfig
    says_looked: ClassVar[bool] = True

    def __init__(
        self,
        open_log: Callable[[Path], int] = kernellog.open_log,
        library: str = events.LIBRARY,
        switches: Path = SWITCHES,
    ) -> None:
        self._open = open_log
        self._library = library
        self._switches = switches
        self._follower: Follower | None = None
        self._declared: list[str] = []
        """Codes that were declared healthy while there was no follower."""

    def supported(self) -> str | None:
        return self.supported_with(XidConfig())

    def supported_with(self, config: DetectorConfig) -> str | None:
        assert isinstance(config, XidConfig)
        no_log = self._no_log(config)
        if no_log is None:
            return None
        no_events = self._no_events(config, log=False)
        return None if no_events is None else f"{no_log}; no NVML events: {no_events}"

    def sources_with(self, config: DetectorConfig) -> str:
        assert isinstance(config, XidConfig)
        no_log = self._no_log(config)
        no_events = self._no_events(config, log=no_log is None)
        return f"{no_log or config.source}; NVML events: {no_events or 'yes'}"

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, XidConfig)
        log = self._log(config)
        unseen = self._unseen(config) if log is None else ""
        received = None
        if self._no_events(config, log=log is not None) is None:
            received = events.Events(config.events_deadline_s)
        merge = Merge(MERGE_S if log is not None else 0.0) if received is not None else None
        follower = Follower(config, load(config), ctx.state_dir / "xid.json", ctx.now(), merge)
        for code in self._declared:
            follower.forget(code)
        self._follower, self._declared = follower, []
        try:
            for signal in follower.restated():
                yield signal
            while True:
                # Lines first, so that an event finds its line.
                # Take in each record completely before its first signal: the daemon may stop at a
                # signal, and does not read a record again whose position it has kept.
                for raw in log.batch(ctx.now()) if log is not None else ():
                    for signal in [*follower.take(raw, ctx.now())]:
                        yield signal
                for event in received.take(ctx.now()) if received is not None else ():
                    for signal in [*follower.receive(event, ctx.now())]:
                        yield signal
                for signal in [*follower.period(ctx.now(), *_troubles(log, received, unseen))]:
                    yield signal
                ctx.looked()
                fds = (s.fd for s in (log, received) if s is not None)
                await readable([fd for fd in fds if fd is not None], FLUSH_S)
        finally:
            self._follower = None
            if log is not None:
                log.close()
            follower.keep()
            if received is not None:
                await received.close()

    def declared_healthy(self, code: str) -> None:
        if self._follower is None:
            self._declared.append(code)
        else:
            self._follower.forget(code)

    def _log(self, config: XidConfig) -> kernellog.KernelLogSource | None:
        """The log; ``None`` if it cannot be read and events replace it."""
        if self._no_log(config) is not None and self._no_events(config, log=False) is None:
            return None
        return kernellog.KernelLogSource(Path(config.source), self._open)

    def _unseen(self, config: XidConfig) -> str:
        """What this detector misses without the log; empty if NVML reports everything."""
        if not any(self._switches.glob("*")):
            return ""
        return f"{self._no_log(config)}; faults of this host's NVSwitches are not seen without it"

    def _no_log(self, config: XidConfig) -> str | None:
        try:
            kernellog.KernelLog(self._open(Path(config.source))).close()
        except PermissionError:
            return (
                f"{config.source} may not be read: "
                "with kernel.dmesg_restrict=1 the daemon needs CAP_SYSLOG"
            )
        except OSError as error:
            return f"{config.source} cannot be opened: {os_reason(error)}"
        return None

    def _no_events(self, config: XidConfig, *, log: bool) -> str | None:
        """Why events are not received; ``log``: the log can be read."""
        if config.events == "never":
            return "switched off"
        if config.events == "auto" and log:
            return "not needed where the log can be read"
        return events.why_not(self._library)


class KnownLines(NamedTuple):
    """The tables of known numbers."""

    xids: table.XidTable
    sxids: sxids.SxidTable


def load(config: XidConfig) -> KnownLines:
    """The configured tables.

    Raises:
        PluginError: see :func:`table.load`.
    """
    return KnownLines(table.load(config.table or None), sxids.load(config.sxid_table or None))


def _troubles(
    log: kernellog.KernelLogSource | None, received: events.Events | None, unseen: str
) -> tuple[int, str, str]:
    """How often records were lost, and why log and events are not received. ``unseen``: what is
    missed without a log."""
    if log is None:
        return 0, unseen, received.problem if received is not None else ""
    return log.overwritten, log.problem, received.problem if received is not None else ""


class Follower:
    """Feeds the log into the findings and remembers its position."""

    def __init__(
        self,
        config: XidConfig,
        known: KnownLines,
        file: Path,
        now: float,
        merge: Merge | None = None,
    ) -> None:
        self._config = config
        self._file = kept.Saved(file)
        self._boot = boot_id()
        before = kept.recall(file, XidMemory, self._boot)
        self.findings = XidFindings(known.xids, before, now)
        self.switches = Switches(known.sxids, before.switches, now)
        self._sequence = kernellog.Sequence(before.seq, before.at)
        self._reader = XidLineReader()
        self._merge = merge
        """Set only if events are received."""
        self._flushed = self._kept = now
        self._judged = False
        """Whether a line was judged since the position was saved."""
        self._not_kept, self._no_events = Trouble(NOT_KEPT), Trouble(NO_EVENTS)
        self._no_log = Trouble(NO_LOG)
        self._told_lost = 0
        self._lost_at = now

    def restated(self) -> list[Signal]:
        """Findings from before the restart that still hold."""
        return [*self.findings.restated(), *self.switches.restated()]

    def take(self, raw: bytes, now: float) -> Iterator[Signal]:
        """Take in one record of the log."""
        record = parse(raw)
        if record is None or not self._sequence.new(record.seq, record.at):
            return
        if record.facility not in self._config.facilities or not any(m in raw for m in _MARKS):
            return
        text = record.text
        broken = read(text)
        if broken is not None:
            self._judged = True
            yield from self.switches.observe(broken, now)
            return
        found: XidLine | None = self._reader.take(text, record.at)
        if found is not None:
            self._judged = True
            yield from self.findings.observe(found, now)
            if self._merge is not None and self._merge.line(found, now):
                yield from self.findings.confirmed(found)

    def receive(self, event: XidEvent, now: float) -> Iterator[Signal]:
        """Take in one NVML event, which waits for its line in the kernel log."""
        assert self._merge is not None
        line = fault(event, now)
        if self._merge.event(line, now):
            yield from self.findings.confirmed(line)

    def period(
        self, now: float, overwritten: int, no_log: str = "", no_events: str = ""
    ) -> Iterator[Signal]:
        """Events without a line, and what is reported and saved once a period."""
        for line in self._merge.alone(now) if self._merge is not None else ():
            self._judged = True
            yield from self.findings.observe(line, now)
        if now - self._flushed < FLUSH_S:
            return
        self._flushed = now
        not_received = no_events and f"NVML events of XIDs are not received: {no_events}"
        yield from self._no_events.report(not_received)
        yield from self._no_log.report(no_log and f"the kernel log is not read: {no_log}")
        for found in (self.findings, self.switches):
            yield from found.flush()
            yield from found.quiet(now, self._config.quiet_s)
        yield from self._lost(now, overwritten)
        if self._judged or now - self._kept > IDLE_KEEP_S:
            self._kept = now
            yield from self._try_to_keep()

    def forget(self, code: str) -> None:
        """Forget the findings of ``code``, or all if it is empty, also after a restart."""
        self.findings.forget(code)
        self.switches.forget(code)
        self._judged = True  # to be saved at the next period

    def keep(self) -> str:
        """Save the position, so that judged lines are not judged again after a restart. Returns why
        that has failed; empty if it has not."""
        found = self.findings.memory(self._boot, self._sequence.last)
        more = {"at": self._sequence.at, "switches": self.switches.grave()}
        why = self._file.keep(structs.replace(found, **more))
        self._judged = self._judged and bool(why)
        return why

    def _try_to_keep(self) -> Iterator[Signal]:
        why = self.keep()
        yield from self._not_kept.report(why and f"a restart will report XIDs again: {why}")

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
            evidence=(f"reported {overwritten} times by the read itself",),
            count=max(more, 1),
        )
