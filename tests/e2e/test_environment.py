"""The environment of a script under `tmd launch`, before and after it joins."""

import json
from pathlib import Path

import pytest

from tests.e2e import early
from tests.e2e.harness import running
from tmd.demo.cluster import ready
from tmd.embedded import EmbeddedRedis


@pytest.mark.timeout(200)
async def test_a_script_takes_the_distributed_path_and_gets_its_true_rank(
    short: Path, redis: EmbeddedRedis
) -> None:
    """Started by exec, as users do. Before it joins, a worker has the place of a standby. A host
    that starts after the end of the only run is not kept waiting for another one."""
    async with running(
        short,
        redis.url,
        script=early.__file__,
        active=("h1", "h2"),
        faults=["between@0:1=wait"],
        prefix=("env",),
    ) as run:
        await run.cluster.until(lambda v: ready(v, 2, 1), "all train, the standby waits", 100)
        run.let_go("between")
        codes = await run.cluster.finished(60)
        await run.cluster.start_launcher("s1", "--one-run")
        late = await run.cluster.finished(60)
        logs = {host: run.cluster.log(host) for host in ("h1", "h2", "s1")}
    saw = {f.name: json.loads(f.read_text()) for f in (short / "trace").glob("saw-*.json")}
    active = {each["rank"]: name for name, each in saw.items() if not each["standby"]}
    first_host = active[0].removeprefix("saw-").partition("_")[0]

    assert set(codes.values()) == set(late.values()) == {0}, logs
    assert sorted(active) == [0, 1]
    for each in saw.values():
        before, after, rank = each["before"], each["after"], str(each["rank"])
        assert before["RANK"] == "1"
        assert before["TORCHELASTIC_RUN_ID"] == "small"
        assert set(after) == set(early.NAMES)
        assert after["RANK"] == after["ROLE_RANK"] == after["GROUP_RANK"] == rank
        assert after["WORLD_SIZE"] == after["ROLE_WORLD_SIZE"] == after["GROUP_WORLD_SIZE"] == "2"
    said = "early.py:22 read RANK=1 before tmd.trainer.join(), which set it to 0"
    warned = {host for host, log in logs.items() if said in log}
    assert warned == {first_host}
    assert not any("WORLD_SIZE=" in log for log in logs.values())
