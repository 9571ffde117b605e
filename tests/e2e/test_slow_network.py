"""A slow network, by means of the kernel: namespaces and token buckets."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, Golden, running
from tmd.core.values.model import Activity
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

WIDE = (*LONG, "--width", "600")
"""A state of some hundred kilobytes: more than the network carries in a step."""
RATE = "16mbit"


@pytest.fixture
def slow() -> Iterator[tuple[str, ...]]:
    """Prefix of a command that runs in a slow network."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        pytest.skip("needs root and tc (package iproute2)")
    name = f"tmd-{secrets.token_hex(4)}"
    inside = ("ip", "netns", "exec", name)
    shaped = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", RATE)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, *shaped, "burst", "64kb", "latency", "400ms"], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture(scope="module")
def wide_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("wide_golden"), WIDE)


@pytest.mark.thorough
async def test_a_joiner_on_a_slow_link_comes_in_step_or_is_dropped(
    tmp_path: Path, redis: EmbeddedRedis, wide_golden: Golden, slow: tuple[str, ...]
) -> None:
    """Training continues meanwhile, and the numbers do not change."""
    async with running(tmp_path, redis.url, faults=[PACE], arguments=WIDE, prefix=slow) as run:
        await run.reached("between")
        view = await run.cluster.until(
            lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
        )
        before = max(w.step for w in workers(view))
        await run.cluster.drain("h2")
        plan = await run.done("drain")
        after = max(w.step for w in workers(await run.cluster.view()))
        run.let_go("between")

        assert plan.how == "live shadow"
        assert after > before + 2
        await run.ends_like(wide_golden)
