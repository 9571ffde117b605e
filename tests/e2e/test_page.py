"""A host is drained by clicking on the page of a real daemon, while a real job trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.browser import chromium, opened, playwright
from tests.e2e.harness import LONG, PACE, Run, running
from tests.marks import program
from tmd.embedded import EmbeddedRedis

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def browsable() -> None:
    """Before a cluster is started for nothing."""
    playwright()
    program("chromium", "chromium")


def address(run: Run, host: str) -> str:
    """Where the daemon of ``host`` serves, by its log."""
    lines = (run.cluster.folder(host) / "daemon.log").read_text().splitlines()
    (port,) = [entry["port"] for line in lines if "port" in (entry := json.loads(line))]
    return f"http://127.0.0.1:{port}/"


async def test_a_drain_made_by_clicking_is_seen_to_its_end(
    browsable: None, short: Path, redis: EmbeddedRedis
) -> None:
    """The page shows the lane done, the host drained and at last the job ended. The browser reports
    no violation of the policy and no error."""
    secret = short / "token"
    secret.touch(mode=0o600)
    secret.write_text(TOKEN)
    http = f'[http]\nlisten = "127.0.0.1:0"\ntoken_file = "{secret}"\n'
    async with (
        chromium() as browser,
        running(short, redis.url, faults=[PACE], arguments=LONG, own_config={"h1": http}) as run,
    ):
        await run.reached("between")
        async with opened(browser, address(run, "h1")) as watched:
            page = watched.page
            await page.locator("[data-outlook=likely]").wait_for()
            await page.get_by_role("button", name="Drain h2").click()
            await page.get_by_label("Token").fill(TOKEN)
            await page.get_by_role("button", name="Drain", exact=True).click()
            row = page.locator("#hosts tr", has_text="h2")
            await row.locator(".chip.drained").wait_for()
            lane = page.locator("#lanes .lane[data-phase=done]")
            await lane.wait_for()
            shown = await lane.inner_text()
            run.let_go("between")
            codes = await run.cluster.finished(60)
            await page.locator("[data-outlook=ended]").wait_for()
        plan = await run.done("drain")

    assert set(codes.values()) == {0}
    assert [m.leaver.host for m in plan.moves] == ["h2"]
    assert re.search(r"rank 1: h2 → s1", shown)
    assert watched.complaints == []
