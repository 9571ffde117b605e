"""The page in a real browser, over a made-up cluster; and what it is sent of 10,000 hosts.

:mod:`tests.e2e.test_page` drains a host of a real job in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time

from msgspec import structs

from tests.browser import chromium, opened
from tests.daemon.page_scene import DRAINED, JOB, OTHER, fill, history, view
from tests.daemon.test_web import TOKEN, WITHIN_S, listening, serving
from tests.values import alert, record
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import (
    READABLE_VERSION,
    Activity,
    ClusterView,
    HostStatus,
    JobState,
    Severity,
)
from tmd.daemon.web.page_rows import JobRow, rows_of
from tmd.daemon.web.page_samples import History, newer, sampled
from tmd.testing import MemoryStore
from tmd.testing.clients import until, worker_status

MANY = 10_000


async def made_up():
    store, now = MemoryStore(), time.time()
    await fill(store, view(now))
    return store, history(now)


async def test_an_operator_reads_and_acts_with_the_keyboard_alone():
    """Verdict, lanes, ledger, heat; job, filter and drain by keys; a wrong token is refused. The
    browser complains of nothing but the refusal."""
    store, past = await made_up()
    async with (
        serving(store, history=past) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/") as watched,
    ):
        page = watched.page
        await assert_tells_all(page)
        assert watched.complaints == []
        await assert_shows_the_other_job(page)
        await page.keyboard.press("/")
        await page.keyboard.type(DRAINED)
        button = page.get_by_role("button", name=f"Undrain {DRAINED}")
        await page.locator("#hosts tbody tr").nth(1).wait_for(state="detached")
        for _ in range(2):  # the field's next stop is the only button
            await page.keyboard.press("Tab")
            if await button.evaluate("node => node === document.activeElement"):
                break
        await page.keyboard.press("Enter")
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        refused = page.locator("#ask-problem")
        await refused.filter(has_text="token is wrong").wait_for()
        still = (await served.store.client().snapshot()).drains
        await page.keyboard.type(TOKEN)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name=f"Drain {DRAINED}", exact=True).wait_for()
        after = (await served.store.client().snapshot()).drains

    assert [d.host for d in still] == [DRAINED]
    assert after == ()
    assert all("401" in complaint for complaint in watched.complaints), watched.complaints
    assert len(watched.complaints) == 1


def test_an_ended_job_occupies_no_hosts():
    """Its machines may be gone: they are not missed, and no rank lacks a heartbeat."""
    ended = structs.replace(record("h1", "h2"), state=JobState.FINISHED, ended_at=9.0)
    rows = rows_of(ClusterView(jobs=(ended,), hosts=(HostStatus("h1", "i"),)), "h1", "c", "h1")

    assert rows["host/h1"].ranks == 0
    assert rows["job/job"].state == "finished"
    assert not [key for key in rows if key in ("host/h2", "rank/job/0")]


async def assert_tells_all(page):
    """Everything that the made-up cluster has can be read."""
    outlook = page.locator("[data-outlook]")
    assert await outlook.get_attribute("data-outlook") == "survives"
    assert "4 rehearsed" not in await outlook.inner_text()
    assert "3 rehearsed" in await outlook.inner_text()
    hot = outlook.locator(".facts div", has_text="hot").locator("dd").first
    assert await hot.inner_text() == "2"
    lanes = page.locator("#lanes .lane")
    assert await lanes.count() == 3
    failover = page.locator("#lanes [data-key$='-3']")
    await failover.locator("summary").click()
    assert "signal 9" in await failover.inner_text()
    assert "detect" in await failover.inner_text()
    await failover.locator("dd", has_text="fallen off the bus").wait_for()
    assert "repeated steps" in await page.locator("#ledger").inner_text()
    assert await page.locator("#charts canvas").count() == 2
    assert await page.locator("#heat canvas").evaluate("node => node.height > 100")
    await assert_marks_plans(page)


DOTS = """canvas => {
  const scale = devicePixelRatio, ctx = canvas.getContext("2d"), found = [];
  const { data } = ctx.getImageData(0, canvas.height - 6 * scale, canvas.width, 1);
  for (let x = 0; x < canvas.width; x++) {
    if (data[4 * x + 3] < 128) continue;
    const last = found.at(-1);
    if (last && last.until === x - 1) last.until = x;
    else found.push({ from: x, until: x });
  }
  return found.map(({ from, until }) => {
    const middle = (from + until) >> 1;
    return [middle / scale, "rgb(" + data.slice(4 * middle, 4 * middle + 3).join(", ") + ")"];
  });
}"""
"""Where below the cells a dot is, from the left, and its colour."""
COLOUR = """name => {
  const node = document.body.appendChild(document.createElement("i"));
  node.style.color = `var(--${name})`;
  const found = getComputedStyle(node).color;
  node.remove();
  return found;
}"""


async def assert_marks_plans(page):
    """The heatmap has a dot for each plan, in the colour of its kind; pointing at it tells it."""
    canvas, shown = page.locator("#heat canvas"), page.locator("#heat-at")
    main, bad = [await page.evaluate(COLOUR, name) for name in ("main", "bad")]
    dots = await canvas.evaluate(DOTS)
    assert [colour for _, colour in dots] == [main, bad, main]
    for (left, _), kind in zip(dots, ("planned", "failover", "planned"), strict=True):
        await canvas.hover(position={"x": left, "y": 20})
        await shown.filter(has_text=f"· {kind} · rank").wait_for()
    assert "rank 21: gpu-022" in await shown.inner_text()
    await canvas.hover(position={"x": dots[0][0] + 20, "y": 20})
    await shown.filter(has_text=re.compile(r"step \d+ · rank 3: \d")).wait_for()


async def assert_shows_the_other_job(page):
    await page.keyboard.press("2")
    await page.locator("[data-outlook=halts]").wait_for()
    assert OTHER in await page.locator("#survival").inner_text()
    assert "no other standby" in await page.locator("#survival").inner_text()
    await page.keyboard.press("1")
    await page.locator("#survival", has_text=JOB).wait_for()


async def test_a_late_answer_leaves_the_next_question_open():
    """A drain is cancelled before the daemon answers; the dialog then asks about another host."""
    store, past = await made_up()
    sent, answering = asyncio.Event(), asyncio.Event()

    async def answer_late(route):
        sent.set()
        await answering.wait()
        await route.continue_()

    async with (
        serving(store, history=past) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/") as watched,
    ):
        page = watched.page
        await page.route("**/v1/drain", answer_late)
        await ask_to_drain(page, "gpu-001")
        await page.locator("[name=token]").fill(TOKEN)
        await page.locator("#ask-do").click()
        await sent.wait()
        await page.get_by_role("button", name="Cancel").click()
        await ask_to_drain(page, "gpu-002")
        answering.set()
        await page.locator("#notice", has_text="The drain of gpu-001 is requested.").wait_for()
        title = await page.locator("#ask-title").inner_text()
        still_open = await page.locator("#ask").is_visible()
        drains = (await served.store.client().snapshot()).drains

    assert (title, still_open) == ("Drain gpu-002?", True)
    assert {d.host for d in drains} == {DRAINED, "gpu-001"}
    assert watched.complaints == []


async def ask_to_drain(page, host):
    await page.locator("#filter").fill(host)
    await page.get_by_role("button", name=f"Drain {host}", exact=True).click()


async def test_the_page_says_what_it_does_not_get():
    """Redis away, a pause, the daemon gone: each is shown, and no text of a host is markup."""
    store = MemoryStore()
    evil = "<img src=x onerror=alert(1)>"
    raised = alert(id="x", severity=Severity.FATAL, message=evil)
    await store.client().put_host(HostStatus("h1", "i", alerts=(raised,)), ttl_s=1e9, wake=False)
    async with (
        serving(store) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/", color_scheme="dark") as watched,
    ):
        page = watched.page
        shown = await page.locator("#alerts").inner_text()
        await store.client().set_paused(True)
        await page.locator("#banners", has_text="Paused").wait_for()
        store.fall_away()
        await page.locator("#link.bad", has_text="memory: away").wait_for()
        store.away = False
        await page.locator("#link.good").wait_for()
        calm = list(watched.complaints)
        await served.stop()
        await page.locator("#link.bad", has_text="does not answer").wait_for()

    assert evil in shown
    assert calm == []


async def test_a_page_is_not_live_while_its_daemon_hangs():
    """The connection stays open, and no error is reported. It is live again with the daemon."""
    store, now = MemoryStore(), time.time()
    async with (
        serving(store) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/", at=now) as watched,
    ):
        page = watched.page
        store.answers.clear()
        await page.clock.fast_forward(45_000)
        await page.locator("#link.bad", has_text="nothing comes from the daemon").wait_for()
        store.answers.set()
        await page.locator("#link.good").wait_for()

    # The page has closed the stream from which nothing came.
    assert len(watched.complaints) == 1
    assert "/v1/page" in watched.complaints[0]


async def test_events_of_more_than_an_hour_ago_are_not_shown():
    store, now = MemoryStore(), time.time()
    store.alerts_before_wipe = int(now * 1000)
    for name, age_s in (("old", 3590.0), ("new", 10.0)):
        raised = alert(id=name, code=f"test.{name}", at=now - age_s)
        await store.client().publish_alert(raised)
    async with (
        serving(store) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/", at=now) as watched,
    ):
        events = watched.page.locator("#alerts summary")
        await events.filter(has_text="2 events of the last hour").wait_for()
        await watched.page.clock.fast_forward(20_000)
        await events.filter(has_text="1 event of the last hour").wait_for()
        await events.click()
        left = await watched.page.locator("#alerts details").inner_text()

    assert "test.new" in left
    assert "test.old" not in left


async def test_a_page_of_another_version_is_loaded_anew():
    """Its scripts may not know the rows of the daemon that serves it now."""
    cluster = {"cluster": {"cluster": "c", "host": "h1", "version": "0.0"}}
    whole = json.dumps({"rows": cluster, "samples": {}})
    earlier = {
        "content_type": "text/event-stream",
        "body": f"retry: 1\nevent: whole\ndata: {whole}\n\n",
    }
    async with (
        serving(MemoryStore()) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/") as watched,
    ):
        page, loaded = watched.page, []
        page.on("load", lambda _: loaded.append(1))
        await page.route("**/v1/page*", lambda route: route.fulfill(**earlier), times=1)
        await page.reload()
        await until(lambda: len(loaded) == 2, within_s=WITHIN_S)
        await page.locator("#link.good").wait_for()

    assert len(loaded) == 2


async def test_the_breaker_and_a_pause_are_shown_and_ended_by_clicking():
    """With the reason; the token is asked for once. So is a record that is too new."""
    store = MemoryStore()
    client = store.client()
    await client.set_breaker(Breaker(open=True, reason="3 of 4 hosts failed", at=1.0))
    await client.put_job(record("h1", "h2", v=READABLE_VERSION + 1), expected=0)
    async with (
        serving(store) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/") as watched,
    ):
        page = watched.page
        banners, dialog = page.locator("#banners"), page.locator("#ask")
        await banners.filter(has_text="3 of 4 hosts failed").wait_for()
        shown = await banners.inner_text()
        await page.locator("#pause", has_text="Resume").click()
        await page.get_by_label("Token").fill(TOKEN)
        await dialog.get_by_role("button", name="Resume").click()
        await banners.filter(has_not_text="The breaker is open").wait_for()
        closed = (await client.snapshot()).breaker
        await page.locator("#pause", has_text="Pause").click()
        asks_again = await page.get_by_label("Token").is_visible()
        await dialog.get_by_role("button", name="Pause").click()
        await banners.filter(has_text="Paused").wait_for()
        paused = (await client.snapshot()).paused

    assert "A later version of tmd wrote the record of job job" in shown
    assert (closed.open, asks_again, paused) == (False, False, True)
    assert watched.complaints == []


# --- many hosts -----------------------------------------------------------------------------------


async def crowd(number):
    """A job of two ranks, and hosts without workers."""
    store = MemoryStore()
    client = store.client()
    for n in range(number):
        await client.put_host(HostStatus(f"n{n}", "i", at=1.0), ttl_s=1e9, wake=False)
    for rank, name in enumerate(("h1", "h2")):
        worker = structs.replace(
            worker_status(f"{name}/job/0.a"), activity=Activity.TRAINING, rank=rank, step=4
        )
        await client.put_host(HostStatus(name, "i", workers=(worker,)), ttl_s=1e9, wake=False)
    await client.put_job(record("h1", "h2"), expected=0)
    return store


async def delta_after_an_alert(number):
    """The next delta once one of ``number`` hosts raises an alert and all others send a heartbeat;
    and how many rows the page was sent before."""
    store = await crowd(number)
    async with serving(store) as served, listening(served, path="/v1/page") as next_event:
        _, whole = await next_event("whole")
        client = store.client()
        for n in range(number):
            raised = (alert(id="n7-1", host="n7"),) if n == 7 else ()
            status = HostStatus(f"n{n}", "i", alerts=raised, at=2.0)
            await client.put_host(status, ttl_s=1e9, wake=False)
        while True:
            _, delta = await next_event("delta")
            if delta["rows"]:
                return delta, len(whole["rows"])


async def test_one_change_among_10000_hosts_sends_as_much_as_among_ten():
    """Although every host has sent another heartbeat."""
    few, few_rows = await delta_after_an_alert(10)
    many, many_rows = await delta_after_an_alert(MANY)

    assert many_rows - few_rows == MANY - 10
    assert many["rows"].keys() == {"host/n7", "alert/n7-1"}
    assert len(json.dumps(many)) == len(json.dumps(few))


async def test_10000_hosts_are_counted_by_role_and_found_by_name():
    """The browser shows a few rows, and a change reaches it."""
    store = await crowd(MANY)
    async with (
        serving(store) as served,
        chromium() as browser,
        opened(browser, f"http://127.0.0.1:{served.port}/") as watched,
    ):
        page = watched.page
        await page.get_by_role("button", name="active 10,002").wait_for()
        rows = await page.locator("#hosts tbody tr").count()
        await page.locator("#filter").fill("n7777")
        await page.locator("#hosts tbody tr").nth(1).wait_for(state="detached")
        status = HostStatus("n7777", "i", alerts=(alert(id="n7777-1", host="n7777"),))
        await store.client().put_host(status, ttl_s=1e9, wake=False)
        await page.locator("#hosts tbody tr", has_text="1 warning").wait_for()

    assert rows <= 20
    assert watched.complaints == []


async def test_what_disappears_and_what_comes_back_are_sent():
    """A drain that is withdrawn, a job that is gone, Redis that was away."""
    store = await crowd(3)
    async with serving(store) as served, listening(served, path="/v1/page") as next_event:
        _, whole = await next_event("whole")
        del store.records["job"]
        _, gone = await next_event("delta")
        store.fall_away()
        _, away = await next_event("away")
        store.away = False
        _, back = await next_event("delta")

    assert {"cluster", "job/job", "rank/job/0", "host/n2"} <= whole["rows"].keys()
    assert {"job/job", "rank/job/0", "rank/job/1"} <= set(gone["gone"])
    assert "away" in away["away"]
    assert back == {"rows": {}, "gone": [], "samples": {}}


def test_lost_time_is_that_of_the_record_and_what_no_record_has_yet() -> None:
    """Whoever leads, and whichever hosts are up."""
    hosts = tuple(
        HostStatus(name, "i", lost={"job": {"hold": seconds}, "other": {"hold": 99.0}})
        for name, seconds in (("h1", 1.0), ("h3", 2.0))
    )
    lost = structs.replace(record("h1", "h2"), lost={"hold": 10.0, "failover": 4.0})
    row = rows_of(ClusterView(hosts=hosts, jobs=(lost,)), "h1#i", "c", "h1")["job/job"]

    assert isinstance(row, JobRow)
    assert row.lost == {"hold": 13.0, "failover": 4.0}


def test_a_job_that_runs_has_charts_beside_many_that_have_ended():
    """Ended ones stay listed for a week, and may come first by name."""
    ended = tuple(record("h0", job=f"eval-{n:02}", state=JobState.FINISHED) for n in range(40))
    status = structs.replace(
        worker_status("h1/job/0.a"), activity=Activity.TRAINING, rank=0, step=7, step_seconds=0.5
    )
    running = ClusterView(
        hosts=(HostStatus("h1", "i", workers=(status,)),), jobs=(*ended, record("h1"))
    )

    assert [sample.step for sample in sampled({}, running, 1.0, 1)["job"]] == [7]


def test_samples_go_on_after_the_clock_was_set_back():
    """What would be in the future is dropped: the charts need times that rise."""
    taken, sent = History(), []
    for at, step in ((100.0, 1), (101.0, 2), (50.0, 3), (51.0, 4)):
        status = structs.replace(
            worker_status("h1/job/0.a"), activity=Activity.TRAINING, rank=0, step=step
        )
        host = HostStatus("h1", "i", workers=(status,))
        taken.take(ClusterView(hosts=(host,), jobs=(record("h1"),)), at)
        sent.append([s.step for s in newer(taken.samples, step - 1).get("job", ())])

    assert sent == [[1], [2], [3], [4]]
    assert [(s.at, s.step) for s in taken.samples["job"]] == [(50.0, 3), (51.0, 4)]
