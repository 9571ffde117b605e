"""Interprets readings of the GPUs. Pure: reports and times in, signals out.

Each reading decides which findings hold; a reported finding that no longer holds is cleared. A
fact that the driver does not provide leaves its findings unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import Struct

from tmd.plugin import Severity, Signal, State

from .meanings import ACTIONS, BROKEN, DRIVER_NOT_LOADED, OPEN, SLOWED, UNKNOWN, fault, slowed
from .report import IDLE, NONE, Gpu, NvmlReport

HOST = "host"
SLOW_WINDOW_S = 600.0
SLOW_READINGS = 6
"""Readings with a hardware slow-down within the window before the rank is handed over."""
LINK_WINDOW, LINK_BAD = 30, 15
"""Bad readings in the window beyond which the link is bad (as in NVRx)."""
STEADY = 3
"""Consecutive readings before a state that may be transient is believed."""
COOL = 5
"""Overheating clears when a GPU is more than this many degrees below its slow-down temperature."""
MEMORY_FACTS = ("remap_pending", "remap_failed", "sram_threshold")
REMEDIES = frozenset({"nvml.recovery_action", "nvml.gpu_broken", "nvml.driver", "nvml.link_down"})
"""Findings whose message says what to do or where. A changed message is reported again."""


class NvmlFinding(Struct, frozen=True):
    severity: Severity
    message: str
    count: int = 0
    """Occurrences since the last reading. Others are states, which are reported once."""


class KnownGpu(Struct, frozen=True):
    """What must survive a restart of the daemon, about a GPU that NVML has shown."""

    pci: str
    links: tuple[int, ...] = ()
    """NVLinks that have been up."""
    settled: int | None = None
    """As in :class:`GpuHistory`."""


Holds = dict[str, NvmlFinding | None]
"""Code -> finding; ``None``: none. A missing code was not checked."""


class GpuHistory:
    """State of one GPU kept between readings."""

    def __init__(self, known: KnownGpu | None = None) -> None:
        self.slow: deque[float] = deque(maxlen=SLOW_READINGS)
        self.often_slow = False
        """Whether it was slow in enough readings since a time without any: if the finding became
        milder in between, it would seem to come back when it gets worse again."""
        self.link_errors: int | None = None
        self.bad: deque[bool] = deque(maxlen=LINK_WINDOW)
        self.up = set(known.links) if known else set()
        """NVLinks that have been up: others may be unused by design."""
        self.down: set[int] = set()
        """Those of them that are down."""
        self.settled = known.settled if known else None
        """ECC errors that are no finding: counted before the first reading in this boot, or before
        an operator declared the host healthy."""
        self.uncorrected = self.settled
        self.hot = False
        self.runs: dict[str, int] = {}
        """Code -> consecutive readings for which it held."""

    def steady(self, code: str, holds: bool) -> bool:
        """Take in whether ``code`` holds in this reading; returns whether it held in the last
        ``STEADY`` ones."""
        self.runs[code] = self.runs.get(code, 0) + 1 if holds else 0
        return self.runs[code] >= STEADY


class Judge:
    """Reports each finding once."""

    def __init__(self, gpus: int, interval_s: float, known: Iterable[KnownGpu] = ()) -> None:
        """``gpus``: the expected number, 0 if unknown. ``interval_s``: between two readings.
        ``known``: the GPUs shown in this boot."""
        self._gpus = gpus
        self._slow_window_s = max(SLOW_WINDOW_S, SLOW_READINGS * interval_s)
        self._reported: dict[tuple[str, str], NvmlFinding] = {}
        self._histories = {gpu.pci: GpuHistory(gpu) for gpu in known}
        self._shown = set(self._histories)
        """GPUs that NVML has shown since the host booted."""
        self._gone: set[str] = set()
        """Those of them that the last reading did not show while the driver worked."""
        self._broken = False
        """The driver did not work at the last reading."""
        self._worked = bool(self._shown)
        """The driver has answered since then."""

    @property
    def known(self) -> tuple[KnownGpu, ...]:
        """To be passed to the judge after a restart."""
        histories = [(pci, self._history(pci)) for pci in sorted(self._shown)]
        return tuple(KnownGpu(pci, tuple(sorted(h.up)), h.settled) for pci, h in histories)

    def forget(self, code: str) -> None:
        """Stop expecting what the findings of ``code``, or all if it is empty, have reported as
        lost: an operator has declared the host healthy."""
        if code in ("", "nvml.missing"):
            self._shown -= self._gone
        if code in ("", "nvml.driver") and self._broken:
            self._shown, self._worked = set(), False
        for history in self._histories.values():
            if code in ("", "nvml.link_down"):
                history.up -= history.down
            if code in ("", "nvml.ecc"):
                history.settled = history.uncorrected

    def observe(self, report: NvmlReport, now: float) -> Iterator[Signal]:
        self._worked = self._worked or not report.codes
        yield from self._report(HOST, self._about_host(report), report.codes)
        self._broken = bool(report.codes)
        if not report.codes:
            self._gone = self._shown - {gpu.pci for gpu in report.gpus if _opens(gpu)}
            for pci in sorted({*report.bound, *self._shown}):
                missing = self._missing(pci, report)
                yield from self._report(f"pci:{pci}", {"nvml.missing": missing}, {})
        for gpu in filter(_opens, report.gpus):
            self._shown.add(gpu.pci)
            facts = self._about_gpu(gpu, self._history(gpu.pci), now)
            yield from self._report(f"pci:{gpu.pci}", facts, gpu.codes, gpu.uuid)

    def hung(self, times: int, problem: str) -> Iterator[Signal]:
        """Report that ``times`` readings had no answer since the last one; 0 clears it.

        A job that still makes steps shows that the GPU computes, so a wedged driver is a reason to
        hand over, but not at once.
        """
        severity = Severity.DEGRADED if times > 1 else Severity.WARNING
        holds = NvmlFinding(severity, problem) if times else None
        yield from self._report(HOST, {"nvml.hung": holds}, {})

    def failed(self, problem: str) -> Iterator[Signal]:
        yield from self._report(HOST, {"nvml.failed": NvmlFinding(Severity.WARNING, problem)}, {})

    # --- the host ---------------------------------------------------------------------------------

    def _about_host(self, report: NvmlReport) -> Holds:
        holds: Holds = {"nvml.failed": None}
        known = self._history(HOST)
        code = fault(report.codes)
        if code is None and report.codes:
            words = ", ".join(f"{name} returned {n}" for name, n in report.codes.items())
            return {"nvml.failed": NvmlFinding(Severity.WARNING, words)}
        # A driver that never worked may mean that the host is not meant to have one.
        severity = Severity.FATAL if self._worked else Severity.WARNING
        passing = code == UNKNOWN and not known.steady("unknown", code == UNKNOWN)
        if code is None:
            known.steady("unknown", False)
            holds["nvml.driver"] = None
        elif not passing:
            what = BROKEN[code]
            reload = "; load the driver" if code == DRIVER_NOT_LOADED else ""
            holds["nvml.driver"] = NvmlFinding(severity, f"NVML: {what} ({code}){reload}")
        if code is None and self._gpus:
            shown = sum(map(_opens, report.gpus))
            few = known.steady("count", shown < self._gpus)
            message = f"NVML shows {shown} GPUs, {self._gpus} are expected"
            holds["nvml.count"] = NvmlFinding(Severity.WARNING, message) if few else None
        return holds

    def _missing(self, pci: str, report: NvmlReport) -> NvmlFinding | None:
        """A GPU that NVML no longer shows or opens, or never showed although sysfs shows it bound
        to the driver. In a container the latter may be by design."""
        gpu = next((g for g in report.gpus if g.pci == pci), None)
        gone = gpu is None or not _opens(gpu)
        if not self._history(pci).steady("missing", gone):
            return None
        if pci in self._shown:
            what = "shows it" if gpu is None else f"opens it (code {gpu.codes[OPEN]})"
            return NvmlFinding(Severity.FATAL, f"NVML no longer {what}; reboot and inspect")
        return NvmlFinding(Severity.WARNING, "sysfs shows it, NVML does not")

    def _history(self, entity: str) -> GpuHistory:
        return self._histories.setdefault(entity, GpuHistory())

    # --- one GPU ----------------------------------------------------------------------------------

    def _about_gpu(self, gpu: Gpu, known: GpuHistory, now: float) -> Holds:
        holds: Holds = {}
        code = fault(gpu.codes)
        passing = code == UNKNOWN and not known.steady("unknown", code == UNKNOWN)
        if code is None:
            known.steady("unknown", False)
            holds["nvml.gpu_broken"] = None
        elif not passing:
            holds["nvml.gpu_broken"] = NvmlFinding(Severity.FATAL, f"{BROKEN[code]} ({code})")
        if gpu.recovery is not None:
            holds["nvml.recovery_action"] = _recovery(gpu.recovery)
        holds |= _memory(gpu, known)
        holds |= _slowed(gpu, known, now, self._slow_window_s)
        holds |= _heat(gpu, known)
        holds |= _pcie(gpu, known)
        holds |= _links(gpu, known)
        return holds

    # --- reporting --------------------------------------------------------------------------------

    def _report(
        self, entity: str, holds: Holds, codes: dict[str, int], uuid: str = ""
    ) -> Iterator[Signal]:
        for code, finding in holds.items():
            key = (entity, code)
            reported = self._reported.get(key)
            if finding is None:
                if reported is not None:
                    del self._reported[key]
                    yield Signal(code, entity, reported.severity, State.CLEARED, "it has ended")
                continue
            if reported is not None and not _is_news(code, finding, reported):
                continue
            if reported is not None and finding.severity.grade < reported.severity.grade:
                yield Signal(code, entity, reported.severity, State.CLEARED, "less severe now")
            self._reported[key] = finding
            failed = [f"{name} returned {number}" for name, number in codes.items()]
            evidence = (*([f"uuid {uuid}"] if uuid else []), *failed)
            yield Signal(
                code,
                entity,
                finding.severity,
                message=finding.message,
                evidence=evidence,
                count=max(finding.count, 1),
            )


def _is_news(code: str, finding: NvmlFinding, reported: NvmlFinding) -> bool:
    """Whether a finding that stands is to be reported once more."""
    other = finding.message != reported.message and code in REMEDIES
    return bool(finding.count) or finding.severity is not reported.severity or other


def _opens(gpu: Gpu) -> bool:
    """Whether NVML answers about ``gpu``: with facts, or with a code that means a fault."""
    return OPEN not in gpu.codes or fault(gpu.codes) is not None


def _recovery(action: int) -> NvmlFinding | None:
    if action == NONE:
        return None
    severity, meaning = ACTIONS.get(action, (Severity.WARNING, f"an action of number {action}"))
    return NvmlFinding(severity, f"the driver asks for {meaning}")


def _memory(gpu: Gpu, known: GpuHistory) -> Holds:
    holds: Holds = {}
    messages = (
        "a row remap waits for a GPU reset; reset it at the next window",
        "a row remap failed: no spare rows; hardware inspection",
        "the driver reports too many SRAM errors; hardware inspection",
    )
    for fact, message in zip(MEMORY_FACTS, messages, strict=True):
        value = getattr(gpu, fact)
        if value is not None:
            holds[f"nvml.{fact}"] = NvmlFinding(Severity.DEGRADED, message) if value else None
    if gpu.uncorrected is not None:
        holds |= _uncorrected(gpu.uncorrected, gpu, known)
    return holds


def _uncorrected(count: int, gpu: Gpu, known: GpuHistory) -> Holds:
    """The first reading is the baseline; a smaller one means that a reset restarted the count."""
    before, known.uncorrected = known.uncorrected, count
    if before is None or count < before:
        known.settled = count
        return {} if before is None else {"nvml.ecc": None}
    if count == before:
        return {}
    # Without field 230 it is unknown whether the driver has contained the error: assume not.
    severity = Severity.FATAL if gpu.recovery is None else Severity.DEGRADED
    more = count - before
    return {"nvml.ecc": NvmlFinding(severity, f"{more} uncorrectable ECC errors; reset", more)}


def _slowed(gpu: Gpu, known: GpuHistory, now: float, window_s: float) -> Holds:
    if gpu.reasons is None:
        return {}
    if gpu.reasons & SLOWED:
        known.slow.append(now)
    while known.slow and now - known.slow[0] > window_s:
        known.slow.popleft()
    known.often_slow = bool(known.slow) and (known.often_slow or len(known.slow) >= SLOW_READINGS)
    if gpu.reasons & SLOWED:
        severity = Severity.DEGRADED if known.often_slow else Severity.WARNING
        message = f"the hardware slows it down: {slowed(gpu.reasons)}"
        return {"nvml.slowed": NvmlFinding(severity, message)}
    return {} if known.slow else {"nvml.slowed": None}


def _heat(gpu: Gpu, known: GpuHistory) -> Holds:
    if gpu.temperature is None or gpu.below_slowdown is None:
        return {}
    known.hot = gpu.below_slowdown <= (COOL if known.hot else 0)
    limit = gpu.temperature + gpu.below_slowdown
    message = f"{gpu.temperature} °C; the hardware slows it down at {limit} °C"
    return {"nvml.hot": NvmlFinding(Severity.WARNING, message) if known.hot else None}


def _pcie(gpu: Gpu, known: GpuHistory) -> Holds:
    # An idle GPU may drop lanes to save power.
    if gpu.width is None or gpu.max_width is None or gpu.reasons is None or gpu.reasons & IDLE:
        return {}
    steady = known.steady("narrow", gpu.width < gpu.max_width)
    message = f"PCIe runs with {gpu.width} of {gpu.max_width} lanes under load"
    return {"nvml.pcie_narrow": NvmlFinding(Severity.WARNING, message) if steady else None}


def _links(gpu: Gpu, known: GpuHistory) -> Holds:
    holds: Holds = {}
    if gpu.links:
        known.up |= {link for link, up in gpu.links.items() if up}
        down = {link for link, up in gpu.links.items() if not up and link in known.up}
        known.down = down | (known.down - gpu.links.keys())  # an unknown link stays what it was
        message = f"NVLink {', '.join(map(str, sorted(known.down)))} went down"
        steady = known.steady("down", bool(known.down))
        holds["nvml.link_down"] = NvmlFinding(Severity.DEGRADED, message) if steady else None
    if gpu.link_errors is not None:
        before, known.link_errors = known.link_errors, gpu.link_errors
        known.bad.append(before is not None and gpu.link_errors > before)
        bad = sum(known.bad)
        message = f"NVLink replayed or recovered in {bad} of the last {len(known.bad)} readings"
        holds["nvml.link_errors"] = (
            NvmlFinding(Severity.DEGRADED, message) if bad > LINK_BAD else None
        )
    return holds
