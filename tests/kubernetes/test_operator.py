"""Nodes of Kubernetes and hosts of tmd agree; with a real Redis and the API server of the tests."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession

from tests.daemon.redises import plain
from tests.kubernetes.api_server import ApiServer, Request
from tests.kubernetes.conftest import (
    SECRET,
    SHIPS_HELM,
    Cluster,
    operating,
    operator_process,
    settings_for,
    until,
)
from tests.marks import extra, program
from tests.slurm import free_ports
from tests.test_cli import tmd
from tests.values import alert
from tmd.cli.kubernetes import labels_of, liveness_at
from tmd.config import Settings
from tmd.core.planning.kubernetes import Condition, KubernetesNode, NodeChange
from tmd.core.values.errors import ConfigError
from tmd.core.values.model import Severity, Strategy
from tmd.core.values.requests import DrainRequest
from tmd.daemon.store import open_store

FAULT = alert(code="nvml.ecc", severity=Severity.FATAL, strategy=Strategy.ACT, message="row 'x'")
SETTLE_S = 0.1
RARELY_S = 60.0
"""Between looks that no change of Kubernetes calls for."""


def complete(server: ApiServer, name: str = "d1") -> bool:
    found = server.condition("drainrequests", name, "DrainComplete", "nvsentinel")
    return found.get("status") == "True"


def health(server: ApiServer, node: str) -> str:
    return server.condition("nodes", node, "TmdHealthy").get("status", "")


async def test_a_drain_request_is_complete_once_no_rank_is_left(
    server: ApiServer, cluster: Cluster
) -> None:
    """The whole way: cordon, DrainRequest, drain, move, complete, deleted, uncordon."""
    await cluster.job("n1", "n2")
    async with operating(server, cluster):
        server.node("n1", cordoned=True)
        await until(cluster.drains, "the host is drained")
        cordoned = await cluster.drains()
        server.drain("d1", "n1", reason="XID 79")
        await until(lambda: bars(cluster, "n1"), "the host gets no rank from now on")
        looked = len(server.requests)
        await until(
            lambda: verbs(server)[looked:].count(("list", "drainrequests")) > 1, "it is seen"
        )
        early = complete(server)
        await cluster.job("n3", "n2")
        await until(lambda: complete(server), "it is complete")
        server.store.remove(("drainrequests", "nvsentinel", "d1"))
        server.node("n1")
        await until(lambda: none(cluster), "the drain is withdrawn")

    assert [(d.host, d.by, d.reserve) for d in cordoned.values()] == [
        ("n1", "kubernetes: node n1 is cordoned", True)
    ]
    assert not early


async def bars(cluster: Cluster, host: str) -> bool:
    return (await cluster.drains())[host].bars


def verbs(server: ApiServer) -> list[tuple[str, str]]:
    return [(r.verb, r.resource) for r in server.requests]


async def none(cluster: Cluster) -> bool:
    return not await cluster.drains()


async def test_the_drain_of_an_operator_is_kept(server: ApiServer, cluster: Cluster) -> None:
    """Neither replaced when the node is cordoned nor withdrawn when it is not any more. It serves a
    DrainRequest as well."""
    theirs = DrainRequest("n1", "theirs", by="ann")
    await cluster.store.drain(theirs)
    async with operating(server, cluster):
        server.node("n1", cordoned=True)
        server.drain("d1", "n1")
        await until(lambda: complete(server), "it is complete")
        server.store.remove(("drainrequests", "nvsentinel", "d1"))
        server.node("n1")
        server.node("n2", cordoned=True)
        await until(lambda: drained(cluster, "n2"), "a later change is carried out")

    assert (await cluster.drains())["n1"] == theirs


async def test_two_operators_look_after_different_nodes(
    server: ApiServer, cluster: Cluster
) -> None:
    """Each leaves alone what the other has drained, also where its host is silent."""
    theirs = DrainRequest("n9", "theirs", by="kubernetes: node n9 is cordoned", reserve=True)
    await cluster.store.drain(theirs)
    server.node("n9", cordoned=True, labels={"pool": "b"})
    server.node("n1", cordoned=True, labels={"pool": "a"})
    async with operating(server, cluster, labels={"pool": "a"}):
        await until(lambda: drained(cluster, "n1"), "it looks after its own")
        looked = len(server.requests)
        await until(lambda: verbs(server)[looked:].count(("list", "nodes")) > 1, "it looks again")

    assert (await cluster.drains())["n9"] == theirs
    assert {r.name for r in server.requests if r.verb == "patch"} == {"n1"}


async def drained(cluster: Cluster, host: str) -> bool:
    return host in await cluster.drains()


async def test_a_finding_is_a_condition_and_one_event(server: ApiServer, cluster: Cluster) -> None:
    """The end is reported as well. Nothing else of a node changes: neither conditions of others nor
    labels, which the right would allow."""
    await cluster.host("n1", FAULT)
    async with operating(server, cluster, healthy_after_s=0.0):
        await until(lambda: health(server, "n1") == "False", "the node is marked")
        bad = server.condition("nodes", "n1", "TmdHealthy")
        await cluster.host("n1")
        await until(lambda: health(server, "n1") == "True", "the node is well again")
        await until(lambda: health(server, "n2") == "True", "another one is, too")

    for (kind, _, name), patch in server.patches:
        (written,) = patch["status"]["conditions"]
        uid = server.store.objects[kind, "", name]["metadata"]["uid"]
        assert written["type"] == "TmdHealthy"
        assert patch == {"metadata": {"uid": uid}, "status": {"conditions": [written]}}
    assert bad["reason"] == "NvmlEcc"
    assert bad["message"] == "nvml.ecc: row 'x' (https://docs/operate/runbook.html)"
    assert server.condition("nodes", "n1", "Ready")["status"] == "True"
    events = sorted(server.all("events"), key=lambda e: int(e["metadata"]["resourceVersion"]))
    assert [(e["type"], e["reason"]) for e in events] == [
        ("Warning", "NvmlEcc"),
        ("Normal", "NoFinding"),
    ]
    assert {e["involvedObject"]["name"] for e in events} == {"n1"}


async def test_a_node_that_has_taken_the_name_of_another_is_not_marked_for_it(
    server: ApiServer, cluster: Cluster
) -> None:
    """It was replaced while the patch was on its way. The next look marks it for itself."""
    from tmd.kubernetes.api import Kubernetes, KubernetesError

    change = NodeChange(
        KubernetesNode("n1", "uid of before"), Condition("False", "NvmlEcc", "x"), None
    )
    async with Kubernetes("", {}) as kubernetes:
        with pytest.raises(KubernetesError, match="cannot patch the status of a node: the"):
            await kubernetes.mark(change)

    assert health(server, "n1") == ""


async def test_at_rest_nothing_is_written_and_a_node_without_tmd_is_never_touched(
    server: ApiServer, cluster: Cluster
) -> None:
    """However often it looks. Its DrainRequest waits for whoever knows the node."""
    server.node("other", cordoned=True)
    server.drain("d1", "other")
    async with operating(server, cluster):
        await until(lambda: health(server, "n5") == "True", "all are marked")
        before = len(server.requests)
        await until(lambda: verbs(server)[before:].count(("list", "nodes")) > 3, "it looks on")
        later = server.requests[before:]

    assert {r.verb for r in later} <= {"list", "watch"}
    assert [r for r in server.requests if r.verb == "patch" and r.name == "other"] == []
    assert await none(cluster)
    assert not complete(server)


@pytest.mark.parametrize("forgotten", [False, True], ids=["dropped", "gone"])
async def test_a_watch_that_is_dropped_is_taken_up_again(
    server: ApiServer, cluster: Cluster, forgotten: bool
) -> None:
    """From where it was, or from a new list if the server has forgotten that (410)."""
    async with operating(server, cluster, every_s=RARELY_S):
        await until(lambda: health(server, "n5") == "True", "it has looked")
        # What the first lists called for is over then; if not, the test shows less, but passes.
        await asyncio.sleep(4 * SETTLE_S)
        watched = verbs(server).count(("watch", "nodes"))
        with server.store.lock:
            server.drop_watches()
            server.node("n2", annotations={"a": "b"})
            server.node("n1", cordoned=True)
            if forgotten:
                server.store.compact()
        await until(lambda: drained(cluster, "n1"), "the cordon is seen")

    assert watched == 1
    assert verbs(server).count(("watch", "nodes")) > watched


async def test_without_the_right_to_watch_it_looks_on(server: ApiServer, cluster: Cluster) -> None:
    """A watch only tells it to look sooner."""
    asked = {("list", "nodes"), ("list", "drainrequests"), ("patch", "nodes/status")}
    server.rights = asked
    async with operating(server, cluster):
        server.node("n1", cordoned=True)
        await until(lambda: drained(cluster, "n1"), "the host is drained")

    assert ("watch", "nodes") in verbs(server)


@pytest.mark.parametrize("status", [403, 422], ids=["no right", "an admission policy"])
async def test_without_events_it_marks_nodes(
    status: int, server: ApiServer, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """A policy may keep objects out of the namespace of Events. The finding counts."""
    server.denies = status
    server.with_drains = False
    server.rights = {("list", "nodes"), ("watch", "nodes"), ("patch", "nodes/status")}
    async with operating(server, cluster):
        await cluster.host("n1", FAULT)
        await until(lambda: health(server, "n1") == "False", "the finding is shown")
        why = "does not let us create an Event" if status == 403 else "cannot create an Event"
        await until(lambda: logged(capfd, why), "it is logged")

    assert verbs(server).count(("create", "events")) == 1


async def test_no_drain_request_is_needed(cluster: Cluster, server: ApiServer) -> None:
    """Nor its CRD: most clusters have no NVSentinel."""
    server.with_drains = False
    async with operating(server, cluster):
        server.node("n1", cordoned=True)
        await until(lambda: drained(cluster, "n1"), "the host is drained")

    assert ("list", "drainrequests") not in verbs(server)


async def test_an_outage_of_redis_only_delays(
    server: ApiServer, redis_binary: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is logged once."""
    with plain(redis_binary, tmp_path / "redis") as (port, process):
        url = f"redis://127.0.0.1:{port}/0"
        cluster = Cluster(open_store(settings_for(url, "outage", tmp_path)))
        await cluster.host("n1")
        await cluster.host("n2")
        async with operating(server, cluster, every_s=0.05):
            await until(lambda: health(server, "n2") == "True", "it has looked")
            process.send_signal(signal.SIGSTOP)
            try:
                server.node("n1", cordoned=True)
                await until(lambda: logged(capfd, "trying again"), "the outage is logged")
                looked = len(server.requests)
                await until(
                    lambda: verbs(server)[looked:].count(("list", "nodes")) > 1, "it tries again"
                )
            finally:
                process.send_signal(signal.SIGCONT)
            await until(lambda: drained(cluster, "n1"), "the host is drained")
        await cluster.store.close()

    assert not logged(capfd, "trying again")


async def test_an_outage_of_the_api_server_only_delays(
    server: ApiServer, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """A right that is taken away is logged, with what is asked for."""
    async with operating(server, cluster):
        await until(lambda: health(server, "n5") == "True", "it has looked")
        server.rights = set()
        await until(
            lambda: logged(
                capfd, 'does not let us list nodes: nodes is forbidden: User "operator"'
            ),
            "it is logged",
        )
        server.rights = None
        server.node("n1", cordoned=True)
        await until(lambda: drained(cluster, "n1"), "the host is drained")

    assert not logged(capfd, "trying again")


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "[]",
        '{"kind": "Status"}',
        '{"metadata": {}, "items": null}',
        '{"metadata": {}, "items": [null]}',
        '{"metadata": {}, "items": [{}]}',
        '{"metadata": {}, "items": [{"metadata": {"name": "n1", "annotations": ["x"]}}]}',
    ],
)
async def test_an_answer_that_is_no_list_of_nodes_only_delays(
    server: ApiServer, cluster: Cluster, capfd: pytest.CaptureFixture[str], answer: str
) -> None:
    """A proxy may answer in place of the API server. It is logged, with what was asked for."""
    async with operating(server, cluster):
        await until(lambda: health(server, "n5") == "True", "it has looked")
        server.garbled = answer
        await until(
            lambda: logged(
                capfd, "cannot list nodes: the answer of the API server is not understood: "
            ),
            "it is logged",
        )
        early = await cluster.drains()
        server.garbled = None
        server.node("n1", cordoned=True)
        await until(lambda: drained(cluster, "n1"), "the host is drained")

    assert early == {}
    assert not logged(capfd, "trying again")


def logged(capfd: pytest.CaptureFixture[str], what: str) -> bool:
    return what in capfd.readouterr().err


# --- the verb -------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    found = {"TMD_CLUSTER__SECRET": SECRET, "TMD_CONFIG": str(folder / "tmd.toml")}
    return {**found, "KUBECONFIG": str(folder / "kubeconfig")}


async def test_an_operator_that_is_killed_in_the_middle_does_nothing_twice(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    """Between the Event and the condition that it is about."""
    await cluster.host("n1", FAULT)
    server.node("n2", cordoned=True)
    server.held = Request("patch", "nodes/status", "n1")
    with operator_process(**environment(tmp_path)) as process:
        await until(server.is_held.is_set, "the Event is there, and the condition on its way")
        process.kill()
    before, events = await cluster.drains(), server.all("events")
    marked = health(server, "n1")
    server.held = None
    done = await asyncio.to_thread(tmd, "kubernetes", "run", "--once", env=environment(tmp_path))

    assert done.returncode == 0, done.stderr
    assert (marked, health(server, "n1")) == ("", "False")
    assert [e["reason"] for e in events] == ["NvmlEcc"]
    assert server.all("events") == events
    assert list(before) == ["n2"]
    assert await cluster.drains() == before


async def test_it_is_alive_until_it_is_told_to_end(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    """Kubernetes asks for /healthz and sends SIGTERM."""
    (port,) = free_ports(1)
    options = ("--liveness", f"127.0.0.1:{port}")
    with operator_process(*options, **environment(tmp_path)) as process:
        await until(lambda: answers(port), "it is alive")
        for kind in ("nodes", "drainrequests"):
            await until(partial(watched, server, kind), "it watches")
        process.terminate()
        status = await asyncio.to_thread(process.wait, 10)
        printed = process.stderr.read()

    assert status == 0
    assert printed == ""


def watched(server: ApiServer, kind: str) -> bool:
    return ("watch", kind) in verbs(server)


async def answers(port: int) -> bool:
    try:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as r:
            return r.status == 200
    except ClientError:
        return False


async def test_credentials_that_are_refused_end_it(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    """With a sentence; Kubernetes starts it again, where people see it."""
    server.token = "another"
    with operator_process(**environment(tmp_path)) as process:
        status = await asyncio.to_thread(process.wait, 10)
        last = process.stderr.read().splitlines()[-1]

    assert status == 1
    assert last == "tmd: the API server accepts no credentials of this operator"


async def test_a_dry_run_prints_what_would_be_and_changes_nothing(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    """Of the nodes with the labels."""
    server.node("n1", cordoned=True, labels={"gpu": "yes"})
    server.node("n2", cordoned=True)
    options = ("--dry-run", "--selector", "gpu")
    done = await asyncio.to_thread(tmd, "kubernetes", "run", *options, env=environment(tmp_path))

    assert done.stdout.splitlines() == [
        "would drain host n1: kubernetes: node n1 is cordoned",
        "would mark node n1 True: NoFinding: tmd holds the host fit for ranks",
    ]
    assert await none(cluster)
    assert {r.verb for r in server.requests} == {"list"}


@pytest.mark.parametrize("text", ["", "{", "clusters: 5", "\xff"])
def test_a_damaged_kubeconfig_is_a_sentence(text: str, tmp_path: Path, settings: Settings) -> None:
    extra("kubernetes")
    file = tmp_path / "kubeconfig"
    file.write_bytes(text.encode("latin-1"))
    done = tmd(
        "kubernetes", "run", "--once", env={**environment(tmp_path), "KUBECONFIG": str(file)}
    )

    assert done.returncode == 2
    assert "no usable kubeconfig or service account" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_an_api_server_the_verb_says_where_to_run_it(
    settings: Settings, tmp_path: Path
) -> None:
    extra("kubernetes")
    done = tmd("kubernetes", "run", "--once", env=environment(tmp_path))

    assert done.returncode == 2
    assert "no usable kubeconfig or service account" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("selector", "labels"),
    [
        ("", {}),
        ("a=b", {"a": "b"}),
        ("a/b=c, d", {"a/b": "c", "d": None}),
        ("a=", {"a": ""}),
        ("=x", None),
        ("a!=b", None),
        ("a==b", None),
        ("zone in (a,b)", None),
        ("zone notin (a)", None),
        ("a b", None),
        ("a=(b)", None),
        ("-a", None),
        ("a/b/c", None),
        ("A_1.example/b.C-d_e=x.Y-1_z", None),
        ("a1.example/b.C-d_e=x.Y-1_z", {"a1.example/b.C-d_e": "x.Y-1_z"}),
    ],
)
def test_a_selector_names_labels(selector: str, labels: dict[str, str | None] | None) -> None:
    """What kubectl understands beyond that is refused, not misunderstood."""
    if labels is None:
        with pytest.raises(ConfigError, match="--selector: write name=value or name instead of"):
            labels_of(selector)
    else:
        assert labels_of(selector) == labels


def test_where_it_says_that_it_is_alive_is_an_address() -> None:
    """A port alone is one of the loopback, as elsewhere. It becomes a part of a URL."""
    with pytest.raises(ConfigError, match="--liveness 'x': write host:port"):
        liveness_at("x")

    assert (liveness_at(""), liveness_at("81")) == ("", "127.0.0.1:81")
    assert liveness_at("[::]:81") == "[::]:81"


# --- the API server of the tests ------------------------------------------------------------------


async def test_kubectl_takes_the_server_of_these_tests_for_one(
    server: ApiServer, cluster: Cluster
) -> None:
    """It cordons, waits for the condition of a DrainRequest, and removes a condition as the
    documentation says."""
    kubectl = program("kubectl", SHIPS_HELM)
    server.token = ""

    def run(*words: str) -> str:
        done = subprocess.run([kubectl, *words], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async with operating(server, cluster):
        server.drain("d1", "n2")
        await asyncio.to_thread(run, "cordon", "n1")
        await until(lambda: drained(cluster, "n1"), "the host is drained")
        waits = ("wait", "drainrequest/d1", "-n", "nvsentinel", "--for=condition=DrainComplete")
        complete_ = await asyncio.to_thread(run, *waits, "--timeout=10s")
        await until(lambda: health(server, "n1") == "True", "it is marked")
    patch = '{"status":{"conditions":[{"type":"TmdHealthy","$patch":"delete"}]}}'
    run("patch", "node", "n1", "--subresource=status", "--type=strategic", "-p", patch)

    assert complete_ == "drainrequest.nvsentinel.nvidia.com/d1 condition met\n"
    assert health(server, "n1") == ""
    assert server.condition("nodes", "n1", "Ready")["status"] == "True"
