"""The command line, as people and scripts use it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from tests import values
from tests.distribution import distribution
from tests.values import alert, member, worker
from tmd import __version__, embedded
from tmd.cli.status import verdicts_of
from tmd.config import DEFAULT_FILE, load
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import (
    Activity,
    HostStatus,
    JobState,
    Mark,
    Move,
    Phase,
    Rehearsal,
    Severity,
    State,
    Strategy,
)
from tmd.core.values.requests import DrainRequest, RehearsalRequest
from tmd.core.values.shadows import noted
from tmd.daemon.redis_client import connect
from tmd.daemon.store import open_store
from tmd.demo.cluster import HARDWARE
from tmd.testing.clients import worker_status

ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("TMD_")},
    "COLUMNS": "200",
}


def tmd(*arguments, env=None):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tmd.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**ENVIRONMENT, **(env or {})},
    )


@pytest.fixture
def config(redis_url, tmp_path):
    """A configuration of a cluster of the test's own."""
    path = tmp_path / "tmd.toml"
    path.write_text(
        f"[cluster]\nname = 'c{os.urandom(4).hex()}'\nsecret = '0123456789abcdef'\n"
        f"[redis]\nurl = '{redis_url}'\n[host]\nname = 'h1'\nruntime_dir = '{tmp_path}'\n"
    )
    return path


@pytest.fixture
def store(config):
    """Run a function of the cluster's store."""
    return runner(load(config))


def runner(settings):
    """A function that runs one of the store of ``settings``."""

    def run(work):
        async def connected():
            store = open_store(settings)
            try:
                return await work(store)
            finally:
                await store.close()

        # In a thread of its own: asyncio.run would take away the loop of pytest-asyncio.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, connected()).result()

    return run


def record(*hosts):
    before = values.record(*hosts)
    plan = values.plan(
        before.membership,
        moves=(Move(rank=0, leaver=member("h9"), joiner=member(hosts[0])),),
        cause="drain",
        reason="drain of h9 requested",
        timeline=(Mark(Phase.PREPARE, 1.0), Mark(Phase.DONE, 3.5)),
    )
    return structs.replace(before, proposed=2, plan=plan, history=(plan,))


@pytest.fixture
def running(store):
    """Two hosts that hold ranks, an alert, a leader."""
    alert = values.alert(
        id="1",
        detector="trainer",
        code="trainer.stalled",
        entity=worker("h1"),
        severity=Severity.FATAL,
        message="silent",
        job="job",
        strategy=Strategy.ACT,
        count=2,
        at=0.0,
    )

    async def fill(s):
        for host in ("h1", "h2"):
            status = structs.replace(
                worker_status(f"{host}/job/0.a"), activity=Activity.TRAINING, step=42, loss=1.25
            )
            alerts = (alert,) if host == "h1" else ()
            seen = HostStatus(host, "i", workers=(status,), alerts=alerts, at=time.time())
            await s.put_host(seen, ttl_s=60, wake=False)
        await s.put_job(record("h1", "h2"), expected=0)
        await s.acquire("h2#abc", ttl_s=60, floor=0)
        await s.publish_alert(alert)

    store(fill)


def test_version_and_help():
    """The help names every verb."""
    version = tmd("--version")
    text = tmd("--help").stdout

    assert version.stdout.strip() == f"tmd {__version__}"
    for verb in ("daemon", "launch", "demo", "status", "drain", "config", "plugins"):
        assert verb in text


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from tmd.cli import app\n"
        "heavy = {'torch', 'redis', 'tmd.config', 'aiohttp', 'rich.table'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=20)

    assert done.returncode == 0


def test_no_verb_imports_torch(config):
    code = (
        "import sys; from tmd.cli import app\n"
        "try: app(['plugins'])\n"
        "except SystemExit: pass\n"
        "import tmd.daemon.service\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True)

    assert done.returncode == 0, done.stderr


def test_status_shows_the_cluster_at_a_glance(config, running):
    done = tmd("status", "-c", config)

    assert done.returncode == 0, done.stderr
    for word in ("led by h2", "h1/job/0.a", "training", "42", "1.2500", "trainer.stalled", "h9 ->"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("terminal", "kind", "more"),
    [(False, "xterm", ()), (True, "dumb", ()), (True, "xterm", ("--json",))],
)
def test_watching_where_nothing_would_be_drawn_is_refused(config, terminal, kind, more):
    """Rich would draw nothing, for ever."""
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tmd.cli", "status", "--watch", *more, "-c", str(config)],
            stdout=theirs if terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            env={**ENVIRONMENT, "TERM": kind},
        )
    finally:
        os.close(ours)
        os.close(theirs)

    assert done.returncode == 2
    assert "--watch needs a terminal" in done.stderr


def test_status_for_programs(config, running):
    """``--json`` has what the table has."""
    status = json.loads(tmd("status", "--json", "-c", config).stdout)

    assert status["leader"] == "h2#abc"
    assert [h["host"] for h in status["hosts"]] == ["h1", "h2"]
    assert status["jobs"][0]["plan"]["phase"] == "done"
    assert status["paused"] is False


@pytest.mark.parametrize(
    ("kept", "shown"), [((0, 0), ""), ((3, 0), "1 MiB"), ((64 << 20, (64 << 20) + 1), "65 MiB")]
)
def test_status_shows_the_memory_kept_for_a_loss(config, store, running, kept, shown):
    """Of the worker that keeps most; without a hot standby no worker keeps any."""

    async def report(s):
        for host, nbytes in zip(("h1", "h2"), kept, strict=True):
            status = structs.replace(worker_status(f"{host}/job/0.a"), kept_bytes=nbytes)
            await s.put_host(HostStatus(host, "i", workers=(status,)), ttl_s=60, wake=False)

    store(report)
    text = tmd("status", "-c", config).stdout

    assert ("MiB" in text) is bool(shown)
    if shown:
        assert f"keeps up to {shown} on each worker, to finish a step after a loss" in text


def test_status_names_hosts_that_are_silent(config, store):
    store(lambda s: s.put_job(record("h7"), expected=0))
    shown = tmd("status", "-c", config).stdout

    assert "silent" in shown
    assert "no heartbeat" in shown
    assert "no leader" in shown


def test_an_ended_job_is_one_line_and_its_hosts_are_not_missed(config, store):
    """They may be gone for good. While launchers still run, the ranks are shown."""
    ended = structs.replace(
        record("h7", "h8"), state=JobState.FINISHED, ended_at=time.time() - 3 * 3600 - 60
    )
    store(lambda s: s.put_job(ended, expected=0))
    shown = tmd("status", "-c", config).stdout
    left = HostStatus("h8", "i", workers=(worker_status("h8/job/0.a"),), at=time.time())
    store(lambda s: s.put_host(left, ttl_s=60, wake=False))
    with_workers = tmd("status", "-c", config).stdout

    assert "job job: finished 3 h ago" in shown
    assert "silent" not in shown
    assert "h8" not in shown
    assert "job job: finished, epoch 1" in with_workers
    assert "h8/job/0.a" in with_workers


def test_drain_and_undrain(config, store, running):
    """The request is stored, and taken back once."""
    drained = tmd("drain", "h1", "--leave", "-c", config)
    view = store(lambda s: s.snapshot())
    undrained = tmd("undrain", "h1", "-c", config)
    again = tmd("undrain", "h1", "-c", config)

    assert drained.returncode == 3
    assert "waits for 1 standby: the job has no other standby" in drained.stderr
    assert "remains requested" in drained.stderr
    assert [(d.host, d.leave) for d in view.drains] == [("h1", True)]
    assert undrained.returncode == 0
    assert again.returncode == 1
    assert "h1 has no drain request" in again.stderr


def test_a_host_is_declared_healthy(config, store, running):
    done = tmd("set-healthy", "h1", "--code", "nic.down", "-c", config)
    unknown = tmd("set-healthy", "h11", "-c", config)
    (request,) = store(lambda s: s.healthy_requests())

    assert done.returncode == 0, done.stderr
    assert (request.host, request.code) == ("h1", "nic.down")
    assert request.by
    assert "no finding nic.down is raised on h1 now; raised: " in done.stderr
    assert unknown.returncode == 1


def test_a_full_folder_for_temporary_files_is_a_sentence(config):
    """And is not blamed on the working folder."""
    limited = (
        "import tempfile; tempfile._candidate_tempdir_list = list\nimport tmd.cli as c; c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "scan", "-c", config],
        capture_output=True,
        text=True,
        timeout=30,
        env=ENVIRONMENT,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("tmd: ")
    assert "No usable temporary directory" in done.stderr
    assert "working folder" not in done.stderr


@pytest.mark.parametrize(
    "verb",
    [("launch", "--job", "j", "--nnodes", "1", "x.py"), ("config", "init", "--to", "x")],
    ids=["launch", "init"],
)
def test_a_working_folder_that_is_gone_is_a_sentence(tmp_path, verb):
    (tmp_path / "gone").mkdir()
    line = f'cd gone && rmdir ../gone && exec "$0" -P -m tmd.cli {" ".join(verb)}'
    done = subprocess.run(
        ["/bin/sh", "-c", line, sys.executable],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )

    assert done.returncode == 2
    assert "the working folder cannot be used: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["status", "simulate", "advise"])
def test_help_names_the_default_configuration(verb):
    """Words in brackets are no markup, also of verbs that are loaded when they run."""
    help_ = " ".join(tmd(verb, "--help").stdout.split())

    assert "[default: $TMD_CONFIG or /etc/tmd/tmd.toml]" in help_


def test_the_file_that_is_not_there_is_named():
    """Without it the check fails for want of a secret, which lies in that file."""
    done = tmd("config", "check")

    assert done.returncode in (0, 2)
    assert (f"there is no {DEFAULT_FILE}; " in done.stderr) == (not DEFAULT_FILE.exists())


@pytest.mark.parametrize(
    "url",
    [
        *("redis://127.0.0.1:1/abc", "redis://127.0.0.1:1/-1", "redis://127.0.0.1:1/0x1"),
        *("redis://127.0.0.1:1?db=-1", "redis://127.0.0.1:1/0?db=-3", "unix:///tmp/x?db=-1"),
        "redis+sentinel://127.0.0.1:1/main/-1",
    ],
)
def test_a_database_that_is_no_number_is_refused(config, url):
    """The client would take database 0, or fail only once it connects."""
    url = {"TMD_REDIS__URL": url}
    done = tmd("config", "check", "-c", config, env=url)

    assert done.returncode == 2
    assert "the database after the host is a number" in done.stderr


@pytest.fixture
def spare(store, running):
    """A standby on a third host."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)
    status = HostStatus("h3", "i", workers=(idle,), at=time.time())
    store(lambda s: s.put_host(status, ttl_s=60, wake=False))


@pytest.fixture
def well(store, running):
    """What was raised on h1 is over."""

    async def clear(s):
        (h1,) = [h for h in (await s.snapshot()).hosts if h.host == "h1"]
        await s.put_host(structs.replace(h1, alerts=()), ttl_s=60, wake=False)

    store(clear)


def test_a_dry_run_says_what_a_drain_would_do_and_does_nothing(config, store, spare, well):
    before = store(lambda s: s.snapshot())
    done = tmd("drain", "h2", "--dry-run", "-c", config)

    assert done.returncode == 0, done.stderr
    assert "rank 1: h2/job/0.a -> h3/job/0.a" in done.stdout
    assert "drain of h2 requested" in done.stdout
    after = store(lambda s: s.snapshot())
    assert (after.drains, after.jobs) == (before.drains, before.jobs) == ((), before.jobs)


def test_a_dry_run_says_what_a_drain_would_wait_for(config, well):
    assert "waits for 1 standby" in tmd("drain", "h2", "--dry-run", "-c", config).stdout


def test_a_standby_of_another_size_is_shown_as_unfit(config, store, running):
    """It was launched with another --nnodes: nothing else would say so while a good one waits."""
    other = structs.replace(worker_status("h3/job/0.a", world_size=3), activity=Activity.STANDBY)
    store(lambda s: s.put_host(HostStatus("h3", "i", workers=(other,)), ttl_s=60, wake=False))

    shown = tmd("status", "-c", config).stdout
    assert "h3/job/0.a is unfit: it was launched for 3 ranks, the job has 2" in shown


def test_a_table_in_a_pipe_has_whole_names(config):
    """Programs look for them; a terminal folds them."""
    piped = tmd("plugins", "-c", config, env={"COLUMNS": ""})
    narrow = tmd("plugins", "-c", config, env={"COLUMNS": "60"})

    assert "rebalance_stragglers" in piped.stdout
    assert "tmd_policies.rebalance_stragglers:RebalanceStragglers" in piped.stdout
    assert "…" not in piped.stdout + narrow.stdout


def test_alerts_that_the_secret_does_not_verify_are_no_empty_list(config, store, tmp_path):
    store(lambda s: s.publish_alert(alert(id="h1-1")))
    secret = {"TMD_CLUSTER__SECRET": "another-secret-of-16"}
    done = tmd("events", "-c", config, env=secret)

    assert done.returncode == 1
    assert "compare [cluster] secret_file" in done.stderr


WORDS = """
from tmd.plugin import Policy

class Words(Policy):
    name = "words"

    def decide(self, view):
        return ["drain it"]
"""


def test_a_policy_that_fails_is_explained(config, tmp_path):
    """Whoever writes one looks here first."""
    distribution(tmp_path, "words", "tmd.policies", WORDS)
    recorded = tmp_path / "view.json"
    recorded.write_text('{"hosts": []}')
    env = {"PYTHONPATH": str(tmp_path), "TMD_POLICIES__ENABLED": '["words", "replace_failed"]'}
    done = tmd("policy", "explain", "--view", recorded, "-c", config, env=env)

    assert done.returncode == 1, done.stderr
    assert "policy words failed, its verdicts are ignored" in done.stdout
    assert "'drain it'" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_recorded_view_is_refused(config, tmp_path):
    recorded = tmp_path / "view.json"
    recorded.write_text('{"name": "package"}')
    done = tmd("policy", "explain", "--view", recorded, "-c", config)

    assert done.returncode == 1
    assert "is not a view in the format of 'tmd status --json': there are no 'hosts'" in done.stderr


def test_a_recorded_view_is_explained(config, store, spare, tmp_path):
    """Every verdict, what is held back and why, and what would be done: without a cluster."""
    store(lambda s: s.drain(DrainRequest("h2", "d1", by="ann")))
    recorded = tmp_path / "view.json"
    recorded.write_text(tmd("status", "--json", "-c", config).stdout)
    nowhere = {"TMD_REDIS__URL": "redis://127.0.0.1:1/0"}
    answer = tmd("policy", "explain", "--view", recorded, "-c", config, env=nowhere)
    data = json.loads(tmd("policy", "explain", "--view", recorded, "--json", "-c", config).stdout)
    live = tmd("policy", "explain", "-c", config).stdout

    assert answer.returncode == 0, answer.stderr
    assert "replace_failed: failed h1/job/0.a: h1/job/0.a: silent" in answer.stdout
    assert "drain_requested: drain h2/job/0.a: drain of h2 requested by ann" in answer.stdout
    assert "job: failover" in answer.stdout
    assert [r["verdict"]["policy"] for r in data["rulings"]] == [
        "replace_failed",
        "drain_requested",
    ]
    assert live == answer.stdout


def test_what_policies_may_not_act_on_is_explained(config, tmp_path):
    alert = {
        "id": "1",
        "host": "h1",
        "detector": "nvml",
        "code": "nvml.ecc",
        "entity": "gpu:0",
        "severity": "fatal",
        "state": "raised",
        "message": "",
        "job": "",
        "count": 1,
        "strategy": "observe",
        "at": 1.0,
    }
    recorded = tmp_path / "view.json"
    view = {"hosts": [{"host": "h1", "incarnation": "i", "alerts": [alert]}]}
    recorded.write_text(json.dumps({**view, "breaker": {"open": True, "reason": "too much"}}))
    answer = tmd("policy", "explain", "--view", recorded, "-c", config).stdout
    recorded.write_text("[]")
    broken = tmd("policy", "explain", "--view", recorded, "-c", config)

    assert "h1: nvml.ecc of gpu:0 moves no rank: strategy of nvml is observe" in answer
    assert "the circuit breaker is open: too much" in answer
    assert "no policy requests anything" in answer
    assert broken.returncode == 1
    assert "tmd status --json" in broken.stderr


def test_status_says_who_is_unfit_and_which_ranks_nobody_could_take(config, store, running):
    """For people in lines of their own, not cut by a column; for programs as a list."""
    why = "the model of this worker differs from the job's: " + "x" * 150
    unfit = structs.replace(
        worker_status("h3/job/0.a"),
        activity=Activity.STANDBY,
        rehearsed=(Rehearsal(step=1, seconds=1.0, refusal=why),),
    )
    store(lambda s: s.put_host(HostStatus("h3", "i", workers=(unfit,)), ttl_s=60, wake=False))
    shown = " ".join(tmd("status", "-c", config).stdout.split())
    (gap,) = json.loads(tmd("status", "--json", "-c", config).stdout)["unprotected"]

    assert f"h3/job/0.a is unfit: it gets no rank: {why}" in shown
    assert "NO STANDBY: no standby could take ranks 0-1: not h3/job/0.a" in shown
    assert (gap["job"], gap["ranks"]) == ("job", [0, 1])


def test_a_drained_host_rehearses_nothing(config, store, running, spare):
    store(lambda s: s.drain(DrainRequest("h3", "r")))
    done = tmd("standby", "rehearse", "h3", "-c", config)

    assert done.returncode == 1
    assert "tmd undrain h3" in done.stderr


def test_draining_a_host_that_nobody_knows_is_an_error(config, store, running):
    done = tmd("drain", "h11", "-c", config)

    assert done.returncode == 1
    assert "no host 'h11'" in done.stderr
    assert "h1, h2" in done.stderr
    assert store(lambda s: s.snapshot()).drains == ()


def test_drain_can_wait(config, store, running):
    """It returns when the host holds no rank, and gives up after its time."""
    late = tmd("drain", "h1", "--wait", "--timeout", "0.3", "-c", config)
    stuck = tmd("drain", "h1", "--wait", "-c", config)
    store(lambda s: s.put_job(structs.replace(record("h3", "h2"), revision=2), expected=1))
    done = tmd("drain", "h1", "--wait", "-c", config)

    assert late.returncode == 1
    assert "still holds ranks" in late.stderr
    assert stuck.returncode == 3
    assert "the job has no other standby" in stuck.stderr
    assert done.returncode == 0
    assert "h1 holds no rank" in done.stdout


def meanwhile(store, change, *arguments):
    """Run a verb, and ``change`` the cluster once a request of the verb is there."""

    async def then(s):
        while not ((view := await s.snapshot()).drains or view.rehearsals):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await change(s)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(tmd, *arguments)
        store(then)
        return asking.result()


def test_no_drain_is_weakened(config, store, running):
    """An operator who has drained a host, to open it, need not fear another one's drain."""
    store(lambda s: s.drain(DrainRequest("h1", "first", by="ann")))
    soft = tmd("drain", "h1", "--soft", "-c", config)
    planned = tmd("drain", "h1", "--soft", "--dry-run", "-c", config)
    kept = store(lambda s: s.snapshot()).drains
    leaving = tmd("drain", "h1", "--leave", "-c", config)
    staying = tmd("drain", "h1", "-c", config)

    assert (soft.returncode, planned.returncode) == (1, 1)
    assert "ann has drained h1 so that it gets no rank" in soft.stderr
    assert "'tmd undrain h1' first" in soft.stderr
    assert planned.stderr == soft.stderr
    assert [d.id for d in kept] == ["first"]
    assert leaving.returncode == 3, leaving.stderr
    assert staying.returncode == 1
    assert "so that its workers exit" in staying.stderr


def test_a_drain_that_is_weakened_is_not_waited_for(config, store, running):
    """By a daemon of an earlier release, or after Redis has lost it."""

    async def weaken(s):
        before = (await s.snapshot()).drains[0].id
        assert await s.swap_drain("h1", before, DrainRequest("h1", "other", soft=True))

    done = meanwhile(store, weaken, "drain", "h1", "--wait", "-c", config)

    assert done.returncode == 1
    assert "h1 is no longer drained: run 'tmd drain h1' again" in done.stderr


def test_a_pause_ends_the_wait_for_a_drain(config, store, running):
    done = meanwhile(store, lambda s: s.set_paused(True), "drain", "h1", "--wait", "-c", config)

    assert done.returncode == 3
    assert "the cluster is paused: nothing moves until 'tmd resume'" in done.stderr


def test_a_host_that_is_switched_off_is_drained(config, store, running):
    """Redis has lost its drain. One that is known by its drain alone needs no option."""
    refused = tmd("drain", "h9", "-c", config)
    done = tmd("drain", "h9", "--absent", "-c", config)
    again = tmd("drain", "h9", "--leave", "-c", config)

    assert refused.returncode == 1
    assert "--absent drains a host that is switched off" in refused.stderr
    assert done.returncode == again.returncode == 0, (done.stderr, again.stderr)
    assert [(d.host, d.leave) for d in store(lambda s: s.snapshot()).drains] == [("h9", True)]


def test_a_host_that_a_plan_gives_a_rank_is_not_free(config, store, running):
    """Its operator would switch it off as it takes the rank."""
    before = record("h1", "h2")
    move = Move(rank=0, leaver=member("h1"), joiner=member("h3"))
    moving = structs.replace(before.plan, moves=(move,), timeline=(Mark(Phase.PREPARE, 1.0),))
    new = structs.replace(values.record("h3", "h2").membership, epoch=2)
    moving = structs.replace(moving, id="p2", phase=Phase.PREPARE, new=new)
    live = structs.replace(before, plan=moving, history=(), revision=2)
    store(lambda s: s.put_host(HostStatus("h3", "i", at=time.time()), ttl_s=60, wake=False))
    store(lambda s: s.put_job(live, expected=1))
    done = tmd("drain", "h3", "--wait", "--timeout", "4", "-c", config)

    assert done.returncode == 1
    assert "h3 may still hold or get a rank after 4 s" in done.stderr


def test_a_host_whose_record_redis_has_lost_is_not_free(config, store, running):
    """Its worker still says which rank it holds."""
    status = structs.replace(worker_status("h3/other/0.a"), activity=Activity.TRAINING, rank=0)
    seen = HostStatus("h3", "i", workers=(status,), at=time.time())
    store(lambda s: s.put_host(seen, ttl_s=60, wake=False))
    done = tmd("drain", "h3", "--wait", "--timeout", "4", "-c", config)

    assert done.returncode == 1
    assert "h3 may still hold or get a rank after 4 s" in done.stderr


def test_pause_and_resume(config, store):
    """Both are stored, and the status shows a pause."""
    tmd("pause", "-c", config)
    paused = store(lambda s: s.snapshot()).paused
    shown = tmd("status", "-c", config).stdout
    tmd("resume", "-c", config)

    assert paused
    assert "PAUSED" in shown
    assert not store(lambda s: s.snapshot()).paused


def test_an_open_breaker_is_shown_and_closed_by_resume(config, store):
    """Who closed it, and when, is in the alert stream."""
    store(lambda s: s.set_breaker(Breaker(open=True, reason="half of the hosts", at=5.0)))
    shown = tmd("status", "-c", config).stdout
    answer = json.loads(tmd("status", "--json", "-c", config).stdout)["breaker"]
    resumed = tmd("resume", "-c", config)
    again = tmd("resume", "-c", config)
    breaker = store(lambda s: s.snapshot()).breaker
    ((_, alert),) = store(lambda s: s.alerts("", limit=10))

    assert "CIRCUIT BREAKER OPEN: half of the hosts" in shown
    assert (answer["open"], answer["reason"]) == (True, "half of the hosts")
    assert "circuit breaker closed" in resumed.stdout
    assert "circuit breaker closed" not in again.stdout
    assert (breaker.open, breaker.at > 5.0) == (False, True)
    assert (alert.code, alert.state) == ("breaker.open", State.CLEARED)


def test_a_job_that_nobody_runs_is_given_up(config, store, running):
    """Not while a host reports a worker; afterwards its name is free."""
    unknown = tmd("forget", "jab", "-c", config)
    busy = tmd("forget", "job", "-c", config)
    store(lambda s: s.put_host(HostStatus("h1", "i", at=time.time()), ttl_s=60, wake=False))
    half = tmd("forget", "job", "-c", config)
    store(lambda s: s.put_host(HostStatus("h2", "i"), ttl_s=0.001, wake=False))
    before = store(lambda s: s.jobs()).records[0]
    done = tmd("forget", "job", "-c", config)
    (after,) = store(lambda s: s.jobs()).records
    again = tmd("forget", "job", "-c", config)
    listed = store(lambda s: s.jobs()).records
    kept = store(lambda s: s.jobs_named(["job"])).records

    assert "there is no job 'jab'" in unknown.stderr
    assert "job still has workers, such as h1/job/0.a" in busy.stderr
    assert "job still has workers, such as h2/job/0.a" in half.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job given up; silent: h2\n"
    assert (after.state, after.revision) == (JobState.FAILED, before.revision + 1)
    assert after.detail.startswith("given up by ")
    assert again.stdout == "job is no longer listed\n"
    assert (listed, kept) == ((), (after,))


def test_a_drain_that_waits_for_a_silent_member_says_so(config, store, running):
    """The job may well train, but no rank of it moves while a daemon is down."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)
    store(lambda s: s.put_host(HostStatus("h3", "i", workers=(idle,)), ttl_s=60, wake=False))
    heard = tmd("drain", "h1", "-c", config)
    store(lambda s: s.put_job(structs.replace(record("h1", "h5"), revision=2), expected=1))
    silent = tmd("drain", "h1", "-c", config)

    assert heard.returncode == 0, heard.stderr
    assert silent.returncode == 3
    assert "job: moves wait: nothing is heard of h5/job/0.a" in silent.stderr


def test_draining_while_paused_is_said(config, store, running):
    store(lambda s: s.set_paused(True))

    paused = tmd("drain", "h1", "-c", config)
    assert paused.returncode == 3
    assert "paused" in paused.stderr


def test_a_move_off_another_host_hides_no_pause(config, store, running):
    """It ends, and nothing else begins."""
    before = record("h1", "h2")
    moving = structs.replace(
        before.plan,
        phase=Phase.PREPARE,
        moves=(Move(rank=1, leaver=member("h2"), joiner=member("h3")),),
        new=before.membership.replaced({1: member("h3")}, 2),
        timeline=(Mark(Phase.PREPARE, 1.0),),
    )
    under_way = structs.replace(before, plan=moving)
    store(lambda s: s.put_job(structs.replace(under_way, revision=2), expected=1))
    store(lambda s: s.set_paused(True))
    other = tmd("drain", "h1", "-c", config)
    left = tmd("drain", "h2", "-c", config)

    assert other.returncode == 3
    assert "the cluster is paused" in other.stderr
    assert left.returncode == 0, left.stderr


def test_a_host_without_a_rank_is_drained_also_while_paused(config, store, running):
    store(lambda s: s.set_paused(True))
    store(lambda s: s.put_host(HostStatus("h3", "i", at=time.time()), ttl_s=60, wake=False))
    done = tmd("drain", "h3", "--wait", "-c", config)

    assert done.returncode == 0, done.stderr
    assert "h3 holds no rank" in done.stdout


def test_a_rehearsal_is_asked_for_and_its_verdict_shown(config, store, running):
    """Exit status 1 if a standby turns out unfit; a host without a standby is an error."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)

    async def appear(s):
        await s.put_host(HostStatus("h3", "i", workers=(idle,)), ttl_s=60, wake=False)

    async def answer(s):
        asked = (await s.snapshot()).rehearsals
        unfit = Rehearsal(step=7, seconds=1.0, refusal="other bits", request=asked[0].id)
        status = structs.replace(idle, rehearsed=(unfit,))
        await s.put_host(HostStatus("h3", "i", workers=(status,)), ttl_s=60, wake=False)

    none = tmd("standby", "rehearse", "h1", "-c", config)
    unknown = tmd("standby", "rehearse", "h11", "-c", config)
    store(appear)
    done = meanwhile(store, answer, "standby", "rehearse", "h3", "-c", config)
    again = tmd("standby", "rehearse", "h3", "--no-wait", "-c", config)
    late = tmd("standby", "rehearse", "h3", "--timeout", "0.3", "-c", config)

    assert (none.returncode, unknown.returncode) == (1, 1)
    assert "h1 has no waiting standby" in none.stderr
    assert "no host 'h11'" in unknown.stderr
    assert done.returncode == 1
    assert "h3/job/0.a: unfit: other bits" in done.stdout
    assert again.returncode == 0
    assert late.returncode == 1
    assert "no verdict of h3/job/0.a after 0.3 s" in late.stderr


def test_a_later_request_answers_an_earlier_one(config, store, running):
    """Two operators ask one host; the verdict that is newer than both serves both."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)
    answered = structs.replace(idle, rehearsed=(Rehearsal(step=7, seconds=1.0, request="later"),))

    async def ask_again(s):
        await s.rehearse(RehearsalRequest("h3", "later"))
        await s.put_host(HostStatus("h3", "i", workers=(answered,)), ttl_s=60, wake=False)

    store(lambda s: s.put_host(HostStatus("h3", "i", workers=(idle,)), ttl_s=60, wake=False))
    done = meanwhile(store, ask_again, "standby", "rehearse", "h3", "-c", config)

    assert done.returncode == 0, done.stderr
    assert "same bits at step 7" in done.stdout


def test_a_rehearsal_ends_if_the_standby_gets_a_rank(config, store, running):
    """Nobody waits ten minutes for a verdict that cannot come."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)
    ranked = structs.replace(idle, activity=Activity.TRAINING, rank=1)

    async def appear(s):
        await s.put_host(HostStatus("h3", "i", workers=(idle,)), ttl_s=60, wake=False)

    async def take_a_rank(s):
        await s.put_host(HostStatus("h3", "i", workers=(ranked,)), ttl_s=60, wake=False)

    store(appear)
    done = meanwhile(store, take_a_rank, "standby", "rehearse", "h3", "-c", config)

    assert done.returncode == 1
    assert "h3 has no standby any more: h3/job/0.a holds rank 1" in done.stderr


def test_what_a_standby_has_rehearsed_is_shown(config, store, running):
    """One verdict on all ranks is a sentence; of several each names the ranks it is about."""
    idle = structs.replace(worker_status("h3/job/0.a"), activity=Activity.STANDBY)
    roles = ("first", "middle", "middle", "last")
    one = noted((), Rehearsal(step=7, seconds=1.0), 1, ("all",) * 4)
    several = noted((), Rehearsal(step=7, seconds=1.0), 2, roles)
    several = noted(several, Rehearsal(step=0, seconds=0.0, refusal="other shapes"), 3, roles)
    same = "rehearsed: same bits at step 7, in 1.0 s"

    assert verdicts_of(()) == ""
    assert verdicts_of(one) == same
    assert verdicts_of(several) == f"ranks 1-2: {same}; ranks 3: unfit: other shapes"
    status = structs.replace(idle, rehearsed=several)
    store(lambda s: s.put_host(HostStatus("h3", "i", workers=(status,)), ttl_s=60, wake=False))
    answer = json.loads(tmd("status", "--json", "-c", config).stdout)
    (answer,) = [w for h in answer["hosts"] if h["host"] == "h3" for w in h["workers"]]
    assert [(v["role"], v["ranks"]) for v in answer["rehearsed"]] == [
        ("middle", [1, 2]),
        ("last", [3]),
    ]


def test_events(config, running):
    """Alerts are listed for people and, with ``--json``, for programs."""
    plain = tmd("events", "-c", config).stdout
    (alert,) = [json.loads(line) for line in tmd("events", "--json", "-c", config).stdout.split()]

    assert "trainer.stalled" in plain
    assert (alert["code"], alert["v"]) == ("trainer.stalled", 1)


def test_plugins(config):
    """Each is listed with the use that the configuration makes of it."""
    rows = {r["name"]: r for r in json.loads(tmd("plugins", "--json", "-c", config).stdout)}

    assert rows["trainer"]["use"] == "act"
    assert rows["replace_failed"]["use"] == "enabled"
    assert rows["observe_only"]["use"] == "off"
    assert "trainer" in tmd("plugins", "-c", config).stdout


def test_config_check(config, tmp_path):
    """A good file passes; in a bad one the key is named."""
    good = tmd("config", "check", "-c", config)
    bad = tmp_path / "bad.toml"
    bad.write_text(config.read_text() + "[detectors.trainer]\nheartbeat_timeout = 3\n")
    wrong = tmd("config", "check", "-c", bad)

    assert good.returncode == 0, good.stderr
    assert "is valid" in good.stdout
    assert wrong.returncode == 2
    assert "heartbeat_timeout_s" in wrong.stderr


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("detectors.trainer", "heartbeat_timeout_s", 0),
        ("detectors.nic", "flaps", 0),
        ("detectors.host", "poll_s", 0),
        ("detectors.nvml", "interval_s", -1),
        ("detectors.xid", "quiet_s", -1),
        ("policies.rebalance_periodic", "every_s", 0),
    ],
)
def test_config_check_refuses_a_value_with_which_a_plug_in_cannot_work(
    config, tmp_path, section, key, value
):
    """A time-out of 0, for instance, would end each healthy worker."""
    bad = tmp_path / "bad.toml"
    bad.write_text(config.read_text() + f"[{section}]\n{key} = {value}\n")
    wrong = tmd("config", "check", "-c", bad)

    assert wrong.returncode == 2
    assert key in wrong.stderr


def test_config_check_reads_the_token_as_the_daemon_would(config, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    done = tmd("config", "check", "-c", config, env={"TMD_HTTP__TOKEN_FILE": str(token)})

    assert done.returncode == 2
    assert f"chmod 640 {token}" in done.stderr


def test_config_show_masks_secrets_and_names_origins(config):
    env = {"TMD_LEADER__TTL_S": "12", "TMD_REDIS__URL": "redis://u:hidden@h:1/0"}
    env["TMD_WEBHOOK__URL"] = "https://hooks.example/hidden"
    env["TMD_WEBHOOK__HEADERS"] = '{"Authorization": "hidden"}'
    shown = tmd("config", "show", "--origin", "-c", config, env=env).stdout

    assert "0123456789abcdef" not in shown
    assert "hidden" not in shown
    assert "ttl_s = 12.0  # TMD_LEADER__TTL_S" in shown
    assert f'name = "h1"  # {config}' in shown
    assert "renew_s = 3.0  # default" in shown


def test_config_show_names_the_variable_that_gives_a_whole_table(config):
    env = {"TMD_DETECTORS__NIC": '{"enabled": false}'}
    shown = tmd("config", "show", "--origin", "-c", config, env=env).stdout

    assert "enabled = false  # TMD_DETECTORS__NIC" in shown


def test_config_show_is_a_configuration(config, tmp_path):
    """What it prints can be used again, but for secrets and what is not set."""
    copy = tmp_path / "copy.toml"
    checks = "[[detectors.exec.checks]]\nname = 'a'\ncommand = ['/bin/true', 'x']\n"
    config.write_text(config.read_text() + checks)
    shown = tmd("config", "show", "-c", config).stdout
    copy.write_text("".join(line for line in shown.splitlines(True) if not line.endswith('""\n')))

    assert tmd("config", "show", "-c", copy).stdout == shown


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("status", "-c", "/none.toml"), 2, "no configuration file /none.toml"),
        (("status", "-c", "/dev/null"), 2, "tmd demo"),
        (("daemon", "-c", "/dev/null"), 2, "TMD_REDIS__URL"),
        (("drain",), 2, "Missing argument"),
        (("no-such-verb",), 2, "No such command"),
    ],
)
def test_errors_are_a_sentence_and_a_status(arguments, code, sentence):
    done = tmd(*arguments)

    assert done.returncode == code
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_redis_away_is_a_sentence(tmp_path, config):
    env = {"TMD_REDIS__URL": f"unix://{tmp_path}/gone.sock"}
    done = tmd("status", "-c", config, env=env)

    assert done.returncode == 1
    assert "for unix:// it is the socket: start Redis" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_daemon_on_the_same_socket_is_refused(config, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "tmd.cli", "daemon", "-c", str(config)],
        stderr=subprocess.DEVNULL,
        env={**ENVIRONMENT, "TMD_HOST__STATE_DIR": str(tmp_path / "state")},
    ) as first:
        try:
            deadline = time.monotonic() + 10
            while not (tmp_path / "tmd.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            second = tmd(
                "daemon", "-c", config, env={"TMD_HOST__STATE_DIR": str(tmp_path / "state")}
            )
        finally:
            first.terminate()
        assert first.wait(10) == 0

    assert second.returncode == 2
    assert "another daemon is serving" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_port_that_is_taken_is_refused_by_the_name_of_its_key(config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"TMD_HTTP__LISTEN": str(port), "TMD_HOST__STATE_DIR": str(tmp_path / "state")}
        done = tmd("daemon", "-c", config, env=env)

    assert done.returncode == 2
    assert f"[http] listen: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_serves_http_and_ends_with_streams_open(config, tmp_path):
    """Without detectors of hardware: a finding about this machine would be an event."""
    off = "".join(f"[detectors.{name}]\nenabled = false\n" for name in HARDWARE)
    config.write_text(config.read_text() + off)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"TMD_HTTP__LISTEN": str(port), "TMD_HOST__STATE_DIR": str(tmp_path / "state")}
    with subprocess.Popen(
        [sys.executable, "-m", "tmd.cli", "daemon", "-c", str(config)],
        stderr=subprocess.DEVNULL,
        env={**ENVIRONMENT, **env},
    ) as process:
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    ready = get(port, "/readyz")
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            metrics = get(port, "/metrics")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/stream", timeout=20) as stream:
                cursor, _, first = (stream.readline() for _ in range(3))
                process.terminate()
                code = process.wait(10)
        finally:
            process.kill()

    assert json.loads(ready)["ready"]
    assert b"tmd_store_reachable 1.0" in metrics
    assert cursor == b"id: 0\n"
    assert first == b"event: state\n"
    assert code == 0


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.read()


def test_the_configuration_may_stand_before_the_verb(config):
    assert tmd("-c", config, "status").returncode == 0


def test_a_lazy_verb_has_its_own_help():
    assert "--nproc-per-node" in tmd("launch", "--help").stdout


def test_drains_are_seen_by_status(config, store, running):
    store(lambda s: s.drain(DrainRequest("h2", id="r", leave=True)))
    spare = HostStatus("h3", "i", standby=True, at=time.time())
    store(lambda s: s.put_host(spare, ttl_s=60, wake=False))
    store(lambda s: s.drain(DrainRequest("h3", id="r", reserve=True)))
    shown = tmd("status", "-c", config).stdout

    assert "leaving" in shown
    assert "in reserve" in shown


# --- xid ------------------------------------------------------------------------------------------


def test_an_xid_is_explained_with_its_source():
    done = tmd("xid", "explain", 79)
    facts = json.loads(tmd("xid", "explain", 79, "--json").stdout)

    assert done.returncode == 0
    for words in ("dropped off the PCIe bus", "rank is moved now", "reboot (not reset)", "2025-10"):
        assert words in done.stdout
    assert (facts["xid"], facts["verdict"], facts["catalogue"]) == (79, "fail", "RESTART_BM")


def test_an_unknown_xid_is_an_answer_and_an_error():
    done = tmd("xid", "explain", 999)

    assert (done.returncode, done.stdout) == (2, "")
    assert "XID 999 is not in the table" in done.stderr
    assert "moves no rank" in done.stderr


def test_an_error_of_a_switch_is_explained_with_its_source():
    done = tmd("xid", "explain", "sxid", 20034)
    facts = json.loads(tmd("xid", "explain", "SXid", 20034, "--json").stdout)

    assert done.returncode == 0, done.stderr
    assert "SXid 20034: the link went down" in done.stdout
    assert "Fabric Manager user guide" in done.stdout
    assert (facts["sxid"], facts["verdict"], facts["fatal"]) == (20034, "fail", "fatal")
    assert (facts["scope"], "reset the GPU" in facts["operator"]) == ("link", True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("sxid", 99999), "SXid 99999 is not in the table (SXids 10001 to"),
        (("sxid",), "'sxid' is neither NUMBER nor 'sxid NUMBER'"),
        (("seven",), "'seven' is neither NUMBER"),
        (("nic", 79), "'nic 79' is neither NUMBER"),
    ],
)
def test_what_cannot_be_explained_is_an_error_that_says_why(words, sentence):
    done = tmd("xid", "explain", *words)

    assert done.returncode == 2
    assert sentence in done.stderr


def test_all_errors_of_switches_are_listed():
    lines = tmd("xid", "list", "--sxid").stdout.splitlines()
    rows = json.loads(tmd("xid", "list", "--sxid", "--json").stdout)

    assert len(lines) == len(rows) + 1
    assert any(line.split()[:3] == ["20034", "fail", "link"] for line in lines)
    assert all(row["source"] and row["operator"] for row in rows)


def test_all_xids_are_listed():
    lines = tmd("xid", "list").stdout.splitlines()
    rows = json.loads(tmd("xid", "list", "--json").stdout)

    assert len(lines) == 174
    assert [r["xid"] for r in rows] == list(range(1, 174))


def test_a_table_of_the_site_is_the_one_explained(tmp_path):
    table = tmp_path / "own.csv"
    table.write_text("# source: ours\n# as_of: 2026-01\nxid,meaning,verdict\n500,new one,drain\n")
    config = tmp_path / "tmd.toml"
    config.write_text(f"[detectors.xid]\ntable = '{table}'\n")
    done = tmd("xid", "explain", 500, "-c", config)

    assert done.returncode == 0
    assert "new one" in done.stdout
    assert "ours (2026-01)" in done.stdout


# --- output for programs, and Redis that comes and goes -------------------------------------------


@pytest.mark.parametrize("verb", ["status", "events"])
def test_json_on_stdout_is_nothing_but_json(verb, config, store, running):
    """Also while something in Redis is forged, which is logged: on stderr."""
    settings = load(config)

    async def forge(_):
        stranger = connect(settings.redis_url(), 2.0)
        prefix = f"{{tmd:{settings.cluster.name}}}:"
        await stranger.hset(prefix + "drains", "h1", b"a lie")
        await stranger.xadd(prefix + "alerts", {"alert": b"{}"})
        await stranger.aclose()

    store(forge)
    done = tmd(verb, "--json", "-c", config)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "the secret of this host does not verify" in done.stderr


@pytest.mark.parametrize("drained", [True, False], ids=["with its drains", "empty"])
def test_a_drain_that_is_waited_for_outlives_an_outage_of_redis(redis_binary, tmp_path, drained):
    """Redis is killed and comes back; the verb says so once, and sees the end of the drain. Without
    the drain the host might get a rank again."""

    def configured(folder):
        folder.mkdir()
        settings = f"[redis]\nurl = 'unix://{folder}/redis.sock'\n[host]\nname = 'h1'\n"
        path = tmp_path / f"{folder.name}.toml"
        path.write_text(f"[cluster]\nname = 'c'\nsecret = '0123456789abcdef'\n{settings}")
        return path

    before, after = tmp_path / "before", tmp_path / "after"
    path, later = map(configured, (before, after))

    async def fill(s, *hosts, drained=True):
        if drained:
            await s.drain(DrainRequest("h1", "d1", by="ann"))
        for host in ("h1", "h2", "h3"):
            await s.put_host(HostStatus(host, "i", at=time.time()), ttl_s=60, wake=False)
        await s.put_job(record(*hosts), expected=0)

    with embedded.redis(before, binary=redis_binary):
        runner(load(path))(lambda s: fill(s, "h1", "h2"))
        waiting = subprocess.Popen(
            [sys.executable, "-m", "tmd.cli", "drain", "h1", "--wait", "-c", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert waiting.stdout.readline() == "drain of h1 requested\n"
    try:
        away = waiting.stderr.readline()
        with embedded.redis(after, binary=redis_binary):
            runner(load(later))(lambda s: fill(s, "h3", "h2", drained=drained))
            # It is back with all that it has: the verb looks all the while.
            (before / "redis.sock").symlink_to(after / "redis.sock")
            output, errors = waiting.communicate(timeout=30)
    finally:
        waiting.kill()
        waiting.wait()

    assert "trying again" in away
    assert waiting.returncode == (0 if drained else 1), errors
    assert ("h1 holds no rank" in output) is drained
    assert ("h1 is no longer drained: run 'tmd drain h1' again" in errors) is not drained
