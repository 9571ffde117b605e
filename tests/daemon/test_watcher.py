"""Supervised detectors, on fake time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from tmd.core.alerts.quota import BURST, MOST, PER_SECOND
from tmd.core.values.model import Exit, Severity, Signal, State, Strategy
from tmd.daemon.detector_run import ASK_S, ASK_SHARE, PROBATION_S, STOP_S
from tmd.daemon.foreign_code import BLOCKS_S
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector, PluginOrigin
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.plugin import Detector, DetectorConfig
from tmd.testing import MemoryStore
from tmd.testing.clients import until, worker_status

pytestmark = pytest.mark.looptime

SIGNAL = Signal(code="a.b", entity="gpu:0", severity=Severity.FATAL)


@pytest.fixture
def watching(tmp_path):
    """A watcher of the given detectors, while the block lasts."""

    def loaded(detector):
        origin = PluginOrigin(name=detector.name, target="t", distribution="d")
        folder = tmp_path / "state" / detector.name
        return LoadedDetector(detector, DetectorConfig(), Strategy.ACT, origin, folder)

    @asynccontextmanager
    async def run(*detectors, store=None, roster=None, **more):
        store = store or MemoryStore()
        journal = Journal(None)
        watcher = Watcher(
            "h1",
            "boot",
            [loaded(d) for d in detectors],
            roster or Roster(),
            AlertSinks(store.client(), StoreHealth(), journal, **more),
        )
        task = asyncio.create_task(watcher.run())
        try:
            yield watcher, store
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            journal.close()

    return run


class Once(Detector):
    name = "once"

    async def watch(self, ctx):
        yield SIGNAL
        await ctx.sleep(1e9)


class Crashing(Detector):
    name = "crashing"

    def __init__(self):
        self.starts = []

    async def watch(self, ctx):
        self.starts.append(ctx.now())
        await ctx.sleep(0)
        if len(self.starts) < 4:
            raise RuntimeError("broken")
        await ctx.sleep(1e9)
        yield SIGNAL


class Wedged(Detector):
    name = "wedged"
    deadline_s = 4.0

    def __init__(self):
        self.starts = 0

    async def watch(self, ctx):
        self.starts += 1
        yield SIGNAL
        await asyncio.sleep(1e9)  # not ctx.sleep: it hangs in its own code


class Ears(Detector):
    name = "ears"
    deadline_s = 4.0

    def __init__(self):
        self.heard = []

    async def watch(self, ctx):
        async for event in ctx.worker_events():
            self.heard.append((ctx.now(), event))
        yield SIGNAL


class Useless(Once):
    def supported(self):
        return "no such hardware here"


class Later(Once):
    asked = 0

    def supported(self):
        self.asked += 1
        return None if self.asked > 100 else "its source is not there yet"


async def test_a_detector_whose_source_appears_later_is_started_then(watching):
    """It starts as promptly after a long wait as after a short one."""
    later = Later()
    async with watching(later) as (watcher, _):
        await asyncio.sleep(99 * ASK_S - 1)
        before = list(watcher.board.alerts)
        await asyncio.sleep(2 * ASK_S)
        after = [a.code for a in watcher.board.alerts]

    assert before == []
    assert after == ["a.b"]
    assert later.asked == 101


class Asking(Later):
    """Asks a slow tool whether it can run, until the tool is swift."""

    name = "asking"
    slow = True

    def supported(self):
        if self.slow:
            time.sleep(1.2 * BLOCKS_S)
        return super().supported()


async def test_a_detector_whose_supported_blocks_is_named_and_asked_rarely(watching):
    """Asked every ten seconds, it would keep the daemon from an eighth of its work."""
    asking = Asking()
    async with watching(asking) as (watcher, store):
        await asyncio.sleep(ASK_S)
        named = {a.entity: a.message for a in watcher.board.alerts}
        await asyncio.sleep(0.9 * BLOCKS_S / ASK_SHARE)
        rarely, asking.slow = asking.asked, False
        await asyncio.sleep(2 * BLOCKS_S / ASK_SHARE)
        news = [a.state for a in store.stream if a.code == "detector.failed"]

    assert "supported() blocks" in named["detector:asking"]
    assert rarely == 1
    assert asking.asked > 3
    assert news == [State.RAISED, State.CLEARED]


class Unready(Crashing):
    """Crashes once, and is not supported any more."""

    name = "unready"

    def supported(self):
        return "its driver is gone" if self.starts else None


async def test_a_detector_that_crashed_and_cannot_run_any_more_has_not_failed(watching):
    async with watching(Unready()) as (_, store):
        await asyncio.sleep(30)
        news = [a.state for a in store.stream if a.code == "detector.failed"]

    assert news == [State.RAISED, State.CLEARED]


async def test_a_signal_becomes_an_alert_that_is_held_and_published(watching):
    async with watching(Once()) as (watcher, store):
        await asyncio.sleep(1)

        assert [(a.code, a.strategy) for a in watcher.board.alerts] == [("a.b", Strategy.ACT)]
        assert store.stream == list(watcher.board.alerts)


async def test_an_alert_is_urgent(watching):
    roster = Roster()
    async with watching(Once(), roster=roster):
        assert await roster.urgent.wait(1)


async def test_alerts_survive_an_outage_with_their_ids(watching):
    store = MemoryStore()
    store.fall_away()
    async with watching(Once(), store=store) as (watcher, _):
        await asyncio.sleep(60)
        store.away = False
        await asyncio.sleep(5)

        assert [a.id for a in store.stream] == [a.id for a in watcher.board.alerts]


async def test_alerts_are_published_again_to_an_emptied_store(watching):
    """Same ids, same order; a store that kept everything gets nothing twice."""
    store = MemoryStore()
    async with watching(Crashing(), Once(), store=store) as (watcher, _):
        await asyncio.sleep(30)
        before = list(store.stream)
        watcher.posted.ring()
        await asyncio.sleep(1)
        kept = list(store.stream)
        store.wipe()
        await asyncio.sleep(61)

        assert len(before) == 3
        assert kept == before
        assert store.stream == before


async def test_a_crash_is_contained_reported_and_retried_with_growing_pauses(watching):
    crashing = Crashing()
    async with watching(crashing, Once()) as (watcher, store):
        await asyncio.sleep(0.5)
        raised = {a.code: a for a in watcher.board.alerts}
        await asyncio.sleep(30)
        pauses = [b - a for a, b in zip(crashing.starts, crashing.starts[1:], strict=False)]
        news = [(a.state, a.count) for a in store.stream if a.code == "detector.failed"]

    assert raised.keys() == {"a.b", "detector.failed"}
    assert raised["detector.failed"].entity == "detector:crashing"
    assert raised["detector.failed"].strategy is not Strategy.ACT
    assert pauses == pytest.approx([1.0, 2.0, 4.0])
    assert news == [(State.RAISED, 1), (State.CLEARED, 3)]


class Ending(Crashing):
    """Raises what ends a process, at its second start in ``supported()``."""

    name = "ending"

    def __init__(self, error):
        super().__init__()
        self.error = error

    def supported(self):
        if len(self.starts) == 1:
            self.starts.append(0.0)
            raise self.error

    async def watch(self, ctx):
        self.starts.append(ctx.now())
        await ctx.sleep(0)
        if len(self.starts) == 1:
            raise self.error
        await ctx.sleep(1e9)
        yield SIGNAL


@pytest.fixture
def sigint_handled():
    """As in the daemon: Ctrl-C raises no ``KeyboardInterrupt``."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_handled")
@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
async def test_a_detector_that_ends_the_process_is_a_crash(watching, error):
    """For instance by the main() of a tool. asyncio would let the first two end the loop."""
    ending = Ending(error)
    async with watching(ending, Once()) as (watcher, store):
        await asyncio.sleep(30)
        news = [(a.state, a.count) for a in store.stream if a.code == "detector.failed"]
        said = [a.message for a in store.stream if a.code == "detector.failed"]

        assert "a.b" in {a.code for a in watcher.board.alerts}
    assert len(ending.starts) == 3
    assert news == [(State.RAISED, 1), (State.CLEARED, 2)]
    assert type(error).__name__ in said[0]


class Blocking(Crashing):
    """Keeps the event loop once."""

    name = "blocking"

    async def watch(self, ctx):
        yield SIGNAL
        time.sleep(1.2 * BLOCKS_S)  # noqa: ASYNC251 - it is wrong on purpose
        await ctx.sleep(1e9)


async def test_a_detector_that_blocks_is_named(watching):
    """All that the daemon does stands still meanwhile. It counts as mended after a while."""
    async with watching(Blocking()) as (watcher, store):
        await asyncio.sleep(1)
        raised = {a.code: (a.entity, a.message) for a in watcher.board.alerts}
        await asyncio.sleep(70)
        news = [a.state for a in store.stream if a.code == "detector.failed"]

    assert raised["detector.failed"][0] == "detector:blocking"
    assert "watch() blocks" in raised["detector.failed"][1]
    assert news == [State.RAISED, State.CLEARED]


class DeafAndBlocking(Crashing):
    """Ignores that it is cancelled, and blocks then."""

    name = "deaf_and_blocking"
    deadline_s = 1.0
    open = True

    async def watch(self, ctx):
        yield SIGNAL
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e9)
        await asyncio.sleep(10)  # until it counts as one that does not stop
        time.sleep(1.2 * BLOCKS_S)  # noqa: ASYNC251 - it is wrong on purpose
        while self.open:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)


async def test_a_detector_that_does_not_stop_stays_a_finding_if_it_blocks(watching):
    deaf = DeafAndBlocking()
    async with watching(deaf) as (watcher, _):
        await asyncio.sleep(100)
        raised = {a.code: a.message for a in watcher.board.alerts}
        deaf.open = False
        await asyncio.sleep(2)

    assert "does not stop" in raised["detector.failed"]


class Cancelling(Crashing):
    """Waits for a cancelled task of its own."""

    name = "cancelling"

    async def watch(self, ctx):
        self.starts.append(ctx.now())
        inner = asyncio.ensure_future(asyncio.sleep(1e9))
        inner.cancel()
        await inner
        yield SIGNAL


async def test_a_detector_that_cancels_itself_is_restarted(watching):
    cancelling = Cancelling()
    async with watching(cancelling) as (watcher, _):
        await asyncio.sleep(4)
        raised = {a.code: a.message for a in watcher.board.alerts}

    assert len(cancelling.starts) == 3
    assert "let its own cancellation escape" in raised["detector.failed"]


async def test_a_detector_that_misses_its_deadline_is_restarted(watching):
    wedged = Wedged()
    async with watching(wedged) as (watcher, _):
        await asyncio.sleep(9)
        codes = {a.code for a in watcher.board.alerts}

    assert wedged.starts == 2
    assert codes == {"a.b", "detector.failed"}


class Impatient(Wedged):
    """Waits with a timeout of its own, then hangs."""

    name = "impatient"

    def __init__(self, wait):
        super().__init__()
        self.wait = wait

    async def watch(self, ctx):
        self.starts += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await self.wait(ctx)
        await asyncio.sleep(1e9)
        yield SIGNAL


@pytest.mark.parametrize(
    "wait", [lambda ctx: ctx.sleep(1e9), lambda ctx: anext(ctx.worker_events())]
)
async def test_a_cancelled_wait_does_not_suspend_the_deadline(watching, wait):
    impatient = Impatient(wait)
    async with watching(impatient) as (watcher, _):
        await asyncio.sleep(9)
        codes = {a.code for a in watcher.board.alerts}

    assert impatient.starts == 2
    assert codes == {"detector.failed"}


class Deaf(Wedged):
    """Ignores that it is cancelled, until it is told to end."""

    name = "deaf"

    def __init__(self):
        super().__init__()
        self.end = asyncio.Event()

    async def watch(self, ctx):
        self.starts += 1
        while not self.end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.end.wait()
        yield SIGNAL


async def test_a_detector_that_ignores_its_deadline_is_reported_until_it_ends(watching):
    """It is not started a second time beside itself."""
    deaf = Deaf()
    async with watching(deaf) as (watcher, _):
        await asyncio.sleep(deaf.deadline_s + STOP_S + 2 * PROBATION_S)
        found, starts = {a.code: a.message for a in watcher.board.alerts}, deaf.starts
        deaf.end.set()
        await asyncio.sleep(2)

    assert found == {"detector.failed": "missed its deadline and does not stop"}
    assert (starts, deaf.starts) == (1, 2)


async def test_a_detector_that_does_not_stop_does_not_hold_up_the_end(watching):
    deaf = Deaf()
    async with watching(deaf):
        await asyncio.sleep(1)
        before = asyncio.get_running_loop().time()
    took = asyncio.get_running_loop().time() - before
    deaf.end.set()

    assert took == pytest.approx(STOP_S)


async def test_a_second_wait_keeps_the_first_from_counting_as_a_hang(watching):
    """A detector may wait for a time and for events at once."""

    class Both(Ears):
        async def watch(self, ctx):
            waiting = asyncio.create_task(ctx.sleep(100))
            await ctx.sleep(1)
            await waiting
            self.heard.append(ctx.now())
            yield SIGNAL
            await ctx.sleep(1e9)

    both = Both()
    async with watching(both):
        await asyncio.sleep(200)

    assert len(both.heard) == 1


async def test_waiting_for_events_does_not_count_as_a_hang(watching):
    ears = Ears()
    async with watching(ears) as (watcher, _):
        await asyncio.sleep(100)

        assert watcher.board.alerts == ()


async def test_detectors_get_every_worker_periodically(watching):
    roster, ears = Roster(), Ears()
    status = worker_status("h1/job/0.a")
    roster.exited(Exit("h1/job/1.a", "job", 1, at=0.0))
    async with watching(ears, roster=roster):
        roster.report(status, asyncio.get_running_loop().time())
        await asyncio.sleep(2.1)
        roster.report(structs.replace(status, epoch=3), asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)

    events = [e for _, e in ears.heard]
    assert events[0].exit is not None
    assert [round(e.silent_s, 1) for e in events[1:-1]] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert events[-1].status.epoch == 3


@pytest.mark.looptime(False)
async def test_a_stalled_daemon_reports_no_worker_as_silent(watching):
    """A resumed daemon sees old heartbeats: that is its own fault."""
    roster, ears = Roster(), Ears()
    async with watching(ears, roster=roster):
        await asyncio.sleep(0.05)
        roster.report(worker_status("h1/job/0.a"), asyncio.get_running_loop().time())
        time.sleep(1.5)  # noqa: ASYNC251 - the point is that the loop stands still
        resumed = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        since = asyncio.get_running_loop().time() - resumed

    # What is silent from before the stall on is so for 1.5 s more.
    assert max(event.silent_s for _, event in ears.heard) < since + 0.5


async def test_an_unsupported_detector_is_not_started(watching):
    async with watching(Useless()) as (watcher, _):
        await asyncio.sleep(1)

        assert watcher.board.alerts == ()


async def test_a_detectors_own_folder_survives_a_restart(watching):
    class Keeping(Detector):
        name = "keeping"

        async def watch(self, ctx):
            place = ctx.state_dir / "count"
            number = int(place.read_text()) + 1 if place.exists() else 1
            place.write_text(str(number))
            yield structs.replace(SIGNAL, message=str(number))
            await ctx.sleep(1e9)

    messages = []
    for _ in range(2):
        async with watching(Keeping()) as (watcher, _):
            await asyncio.sleep(1)
            messages += [a.message for a in watcher.board.alerts]

    assert messages == ["1", "2"]


class Flapping(Detector):
    name = "flapping"

    async def watch(self, ctx):
        while True:
            yield SIGNAL
            yield structs.replace(SIGNAL, state=State.CLEARED)


class Spamming(Detector):
    name = "spamming"

    async def watch(self, ctx):
        for number in range(10 * MOST):
            yield structs.replace(SIGNAL, entity=f"gpu:{number}", severity=Severity.WARNING)
        yield structs.replace(SIGNAL, entity="gpu:lost")
        await ctx.sleep(1e9)


def fatal(counter):
    """How many fatal alerts were published."""
    return sum(n for (_, severity, _), n in counter.counts.items() if severity is Severity.FATAL)


async def test_a_detector_that_flaps_is_heard_at_a_rate(watching):
    """Its log, journal and stream are rate-limited, and other detectors are not delayed."""
    async with watching(Flapping(), Once()) as (watcher, _):
        await asyncio.sleep(0.01)
        at_once = fatal(watcher.counter)
        await asyncio.sleep(60)
        later = fatal(watcher.counter) - at_once

        assert at_once <= 2 * (BURST + 2) + 1
        assert later == pytest.approx(2 * 60 * PER_SECOND, rel=0.05)
        assert "once" in {alert.detector for alert in watcher.board.alerts}


async def test_unlimited_signals_are_rate_limited_without_delaying_the_gravest(watching):
    """The detector never pauses while it only repeats states."""
    async with watching(Spamming()) as (watcher, _):
        before = asyncio.get_running_loop().time()
        await until(lambda: any(a.severity is Severity.FATAL for a in watcher.board.alerts))

        assert asyncio.get_running_loop().time() - before < 0.1
        assert len(watcher.board.alerts) == MOST + 2
        assert watcher.board.alerts[-1].severity is Severity.FATAL


async def test_what_waits_for_the_disk_is_bounded_and_the_newest_is_kept(watching):
    """With more alerts than the disk can write, the oldest are dropped."""
    async with watching(unwritten=100) as (watcher, store):
        for number in range(60):
            signal = structs.replace(SIGNAL, entity=f"gpu:{number}")
            watcher.fold(signal, "d", Strategy.OBSERVE)
            watcher.fold(structs.replace(signal, state=State.CLEARED), "d", Strategy.OBSERVE)
        await until(lambda: len(store.stream) >= 100)

        assert [alert.entity for alert in store.stream] == [
            f"gpu:{number}" for number in range(10, 60) for _ in range(2)
        ]
