"""The Helm chart and the examples: rendered by helm, checked against schemas of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.conftest import SECRET, SHIPS_HELM, Cluster, operating, rights_of, until
from tests.kubernetes.test_operator import complete, drained, health
from tests.marks import program
from tests.test_cli import tmd
from tmd import __version__
from tmd.config import Settings
from tmd.daemon.redis_client import connect

ROOT = Path(__file__).parents[2]
CHART = ROOT / "packaging" / "helm" / "tmd"
EXAMPLES = ROOT / "examples" / "kubernetes"
VALUES = ("plain", "whole")
SCHEMA = "1.35"
WITHOUT_SCHEMA = {"PodMonitor", "JobSet"}
"""Kinds of other projects: nothing here knows their fields."""

Object = dict[str, Any]


def helm(*words: str | Path, status: int = 0) -> str:
    binary = program("helm", SHIPS_HELM)
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def rendered(values: str, *options: str) -> list[Object]:
    file = CHART / "ci" / f"{values}.yaml"
    text = helm("template", "gpu", CHART, "--namespace", "tmd-system", "-f", file, *options)
    return [body for body in yaml.safe_load_all(text) if body]


@pytest.fixture(scope="module")
def whole() -> list[Object]:
    return rendered("whole")


@pytest.fixture(scope="module")
def plain() -> list[Object]:
    return rendered("plain")


def one(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only object of the kind, or the one called ``name``."""
    (found,) = (b for b in objects if b["kind"] == kind and name in ("", b["metadata"]["name"]))
    return found


def pods(objects: list[Object]) -> list[Object]:
    return [b["spec"]["template"]["spec"] for b in objects if "template" in b.get("spec", {})]


def containers(objects: list[Object]) -> dict[str, Object]:
    return {
        c["name"]: c
        for pod in pods(objects)
        for c in (*pod["containers"], *pod.get("initContainers", ()))
    }


def check_schema(body: Object) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(body, SCHEMA, strict=True)


# --- the chart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_is_in_order(values: str) -> None:
    """``helm lint --strict`` finds nothing."""
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "-f", CHART / f"ci/{values}.yaml")


@pytest.mark.parametrize("values", VALUES)
def test_every_object_fits_its_schema(values: str) -> None:
    """Strictly: an unknown field is an error."""
    objects = rendered(values)
    for body in objects:
        if body["kind"] not in WITHOUT_SCHEMA:
            check_schema(body)

    assert len(objects) >= 9


def test_the_daemon_gives_way_to_no_pod_and_takes_the_place_of_none(
    plain: list[Object], whole: list[Object]
) -> None:
    """Unless an operator names a class."""
    made = one(plain, "PriorityClass")
    named = [pods([one(each, "DaemonSet")])[0]["priorityClassName"] for each in (plain, whole)]

    assert (made["preemptionPolicy"], made["value"] > 0) == ("Never", True)
    assert named == [made["metadata"]["name"], "system-node-critical"]
    assert not [body for body in whole if body["kind"] == "PriorityClass"]


def test_a_misspelt_field_is_refused(plain: list[Object]) -> None:
    """The API server would ignore it."""
    body = one(plain, "DaemonSet")
    body = {**body, "spec": {**body["spec"], "updateStrategie": {}}}

    with pytest.raises(Exception, match="updateStrategie"):
        check_schema(body)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == chart["version"] == __version__


def test_the_table_of_values_is_whole() -> None:
    """It has each value, and no other."""

    def leaves(value: Any, path: str = "") -> set[str]:
        if not isinstance(value, dict) or not value or path.endswith(("resources", "labels")):
            return {path}
        return {p for key, v in value.items() for p in leaves(v, f"{path}.{key}".lstrip("."))}

    table = (CHART / "README.md").read_text()
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)

    assert {name for row in rows for name in re.findall(r"`([\w.]+)`", row)} == leaves(
        yaml.safe_load((CHART / "values.yaml").read_text())
    )


def test_each_group_of_values_refuses_unknown_ones() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    groups = {"": schema, **schema["properties"]}
    groups |= schema["properties"]["daemon"]["properties"]
    del groups["global"]  # Helm's own
    closed = {name: g["additionalProperties"] for name, g in groups.items() if "properties" in g}

    assert set(closed) >= {"", "image", "redis", "daemon", "nvidia", "operator", "podMonitor"}
    assert set(closed.values()) == {False}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "redis.url=redis://r"), "image.repository: no image of tmd is published"),
        (("--set", "image.repository=i"), "redis.url: name your Redis"),
        (
            ("--set", "image.repository=i,redis.url=redis://r,redis.install=true"),
            "redis.url and redis.install: set one of them",
        ),
        (("--set", "redis.url=mysql://r"), "at '/redis/url'"),
        (("--set", "daemon.httpPort=http"), "at '/daemon/httpPort'"),
        (("--set", "deamon.config=x"), "deamon"),
    ],
)
def test_a_wrong_value_is_named(options: tuple[str, ...], says: str) -> None:
    assert says in helm("template", "gpu", CHART, *options, status=1)


def test_a_secret_of_ones_own_is_used_and_none_is_made() -> None:
    objects = rendered("plain", "--set", "secret.existing=mine")
    named = {
        v["secret"]["secretName"] for pod in pods(objects) for v in pod["volumes"] if "secret" in v
    }

    assert [b for b in objects if b["kind"] == "Secret"] == []
    assert named == {"mine"}


def test_with_a_secret_of_ones_own_the_url_may_be_dropped() -> None:
    """As ``redis.url:`` without a value does it in a file of values."""
    assert one(rendered("plain", "--set", "secret.existing=mine,redis.url=null"), "DaemonSet")


# --- rights ---------------------------------------------------------------------------------------


def test_no_container_has_more_rights_than_it_needs(
    plain: list[Object], whole: list[Object]
) -> None:
    """Root only makes the folders of the node, with three capabilities."""
    # The daemon of the other values is privileged, since it reads the kernel's log.
    found = {**containers(whole), **containers(plain)}
    folders = found.pop("folders")["securityContext"]
    daemon = one(plain, "DaemonSet")["spec"]["template"]["spec"]

    assert folders["capabilities"]["drop"] == ["ALL"]
    assert set(folders["capabilities"]["add"]) == {"CHOWN", "FOWNER", "DAC_READ_SEARCH"}
    for name, container in found.items():
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
    assert found["daemon"]["securityContext"]["runAsUser"] == 7471
    assert not daemon["automountServiceAccountToken"]
    assert {v["hostPath"]["path"] for v in daemon["volumes"] if "hostPath" in v} == {
        "/run/tmd",
        "/var/lib/tmd",
    }


def test_only_the_kernel_log_needs_a_privileged_container(whole: list[Object]) -> None:
    privileged = [
        name for name, c in containers(whole).items() if c["securityContext"].get("privileged")
    ]

    assert privileged == ["daemon"]


def test_the_operator_may_do_these_things_and_no_others(
    plain: list[Object], whole: list[Object]
) -> None:
    base = {
        ("list", "nodes"),
        ("watch", "nodes"),
        ("patch", "nodes/status"),
        ("create", "events"),
    }
    drains = {(verb, "drainrequests") for verb in ("get", "list", "watch")}

    assert rights_of(plain) == base
    assert rights_of(whole) == base | drains | {("patch", "drainrequests/status")}


async def test_the_rights_of_the_chart_are_enough(
    server: ApiServer, cluster: Cluster, whole: list[Object]
) -> None:
    """The API server refuses whatever they do not allow."""
    server.rights = rights_of(whole)
    server.drain("d1", "n1")
    async with operating(server, cluster):
        server.node("n2", cordoned=True)
        await until(lambda: drained(cluster, "n2"), "the host is drained")
        await until(lambda: complete(server), "the request is complete")
        await until(lambda: health(server, "n5") == "True", "nodes are marked")

    assert {(r.verb, r.resource) for r in server.requests} <= server.rights


def test_a_daemon_without_root_owns_what_one_with_root_has_written(
    plain: list[Object], tmp_path: Path
) -> None:
    """``daemon.kernelLog`` is no longer set. The script has the capabilities of the chart alone."""
    if os.geteuid():
        pytest.skip("needs root: run the tests with sudo on a machine where that does no harm")
    state = tmp_path / "state"
    (state / "detectors").mkdir(parents=True, mode=0o700)
    (state / "detectors" / "xid").write_text("written by root")
    os.chown(state, 7471, 7471)
    state.chmod(0o700)
    folders = containers(plain)["folders"]
    (script,) = folders["args"]
    added = folders["securityContext"]["capabilities"]["add"]
    allowed = ",".join(["-all", *(f"+{name.lower()}" for name in added)])
    shell = [*folders["command"], script.replace("/host", str(tmp_path))]
    subprocess.run(["setpriv", f"--bounding-set={allowed}", *shell], check=True)

    assert {path.stat().st_uid for path in (state, *state.rglob("*"))} == {7471}


# --- names ----------------------------------------------------------------------------------------


def test_requests_in_the_namespace_of_events_have_roles_of_their_own() -> None:
    """NVSentinel may be in ``default``, where the operator writes its Events."""
    objects = rendered("whole", "--set", "nvsentinel.namespace=default")
    names = [
        (b["kind"], b["metadata"].get("namespace"), b["metadata"]["name"])
        for b in objects
        if b["kind"] in ("Role", "RoleBinding")
    ]

    assert len(names) == len(set(names)) == 4


def test_a_long_release_name_leaves_room_for_what_a_controller_appends() -> None:
    """A label of at most 63 characters holds the name of a StatefulSet and 11 more."""
    options = ("--set", "image.repository=i,redis.install=true")
    text = helm("template", "a" * 53, CHART, *options)
    objects = [body for body in yaml.safe_load_all(text) if body]
    redis = one(objects, "StatefulSet")["metadata"]["name"]

    assert len(redis) <= 52
    assert f"{redis}-0.{redis}." in one(objects, "Secret")["stringData"]["redis-url"]


# --- what the containers are given ----------------------------------------------------------------


def checksums(options: str) -> dict[str, str]:
    """The checksum of where Redis is, by the kind of the pods' owner."""
    text = helm("template", "gpu", CHART, "--set", f"image.repository=i,{options}")
    return {
        body["kind"]: body["spec"]["template"]["metadata"]["annotations"]["checksum/redis"]
        for body in yaml.safe_load_all(text)
        if body and body["kind"] in ("DaemonSet", "Deployment")
    }


def test_pods_are_replaced_when_redis_is_elsewhere() -> None:
    """They read the address only when they start. The checksum does not depend on the password."""
    here = checksums("redis.url=redis://:one@r:6379/0")

    assert set(here) == {"DaemonSet", "Deployment"}
    assert len(set(here.values())) == 1
    assert checksums("redis.url=redis://:two@r:6379/0") == here
    for other in ("redis.url=redis://:one@s:6379/0", "redis.install=true"):
        assert not set(checksums(other).values()) & set(here.values())


def test_everybody_reads_one_configuration_that_may_hold_a_secret(plain: list[Object]) -> None:
    """A public file with the address of a webhook would be refused."""
    for name, pod in zip(("daemon", "operator"), pods(plain), strict=True):
        (config,) = (v["configMap"] for v in pod["volumes"] if v["name"] == "config")
        (container,) = pod["containers"]
        mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}

        assert container["name"] == name
        assert config == {"name": "gpu-tmd", "defaultMode": 0o440}
        assert mounted["config"] == "/etc/tmd"
        assert {"name": "TMD_CONFIG", "value": "/etc/tmd/tmd.toml"} in container["env"]


def environment_of(container: Object, folder: Path) -> dict[str, str]:
    """As the kubelet would fill it in on node n1, with files of ``folder`` for volumes."""
    fields = {"spec.nodeName": "n1", "status.hostIP": "10.0.0.1", "status.podIP": "10.1.0.1"}
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" not in source:
            found[variable["name"]] = variable["value"]
    found["TMD_CONFIG"] = str(folder / "tmd.toml")
    found["TMD_CLUSTER__SECRET_FILE"] = str(folder / "secret")
    return found


def test_the_operator_looks_after_the_nodes_of_the_daemons() -> None:
    """Unless it gets labels of its own. Another cluster of tmd may have the other nodes."""
    chosen = "--set=daemon.nodeSelector.pool=a"
    shared = containers(rendered("plain", chosen))["operator"]["args"]
    own = containers(rendered("plain", chosen, "--set=operator.nodeLabels.tmd=yes"))["operator"]

    assert "--selector=pool=a" in shared
    assert "--selector=tmd=yes" in own["args"]


@pytest.mark.parametrize("values", VALUES)
def test_the_daemon_of_the_chart_has_a_valid_configuration(values: str, tmp_path: Path) -> None:
    objects = rendered(values)
    daemon, secret = containers(objects)["daemon"], one(objects, "Secret")["stringData"]
    (tmp_path / "tmd.toml").write_text(one(objects, "ConfigMap", "gpu-tmd")["data"]["tmd.toml"])
    (tmp_path / "secret").write_text(secret["secret"])
    (tmp_path / "secret").chmod(0o440)
    known = {**environment_of(daemon, tmp_path), "TMD_REDIS__URL": secret["redis-url"]}
    for folder in ("RUNTIME", "STATE"):
        known[f"TMD_HOST__{folder}_DIR"] = str(tmp_path)
    shown = tmd("config", "show", env=known)

    connect(secret["redis-url"], 1.0)
    assert shown.returncode == 0, shown.stderr
    passwords = 2 if "redis-password" in secret else 1  # one for the Sentinels as well
    assert secret["redis-url"].count(secret.get("redis-password", "hunter2")) == passwords
    assert 'name = "n1"' in shown.stdout
    assert 'advertise = "10.0.0.1"' in shown.stdout
    users = '["7472", "1000660000", "alice"]' if values == "whole" else '["7472"]'
    assert f"users = {users}" in shown.stdout
    place = "0.0.0.0:7471" if values == "whole" else "127.0.0.1:7471"
    assert f'listen = "{place}"' in shown.stdout


async def test_the_operator_of_the_chart_has_valid_options(
    server: ApiServer, cluster: Cluster, settings: Settings, whole: list[Object], tmp_path: Path
) -> None:
    """It looks only at nodes with the configured labels."""
    server.node("n1", labels={"tmd": "yes"}, cordoned=True)
    args = containers(whole)["operator"]["args"]
    file = tmp_path / "chart.toml"
    file.write_text(one(whole, "ConfigMap", "gpu-tmd")["data"]["tmd.toml"])
    own = {
        "TMD_CLUSTER__NAME": settings.cluster.name,
        "TMD_REDIS__URL": settings.redis.url,
        "TMD_CLUSTER__SECRET": SECRET,
        "TMD_CONFIG": str(file),
        "KUBECONFIG": os.environ["KUBECONFIG"],
    }
    done = await asyncio.to_thread(tmd, "kubernetes", "run", "--dry-run", *args, env=own)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("would drain host n1: kubernetes: node n1 is cordoned\n")
    assert "n2" not in done.stdout


# --- examples -------------------------------------------------------------------------------------


def examples() -> list[Object]:
    files = sorted(EXAMPLES.glob("*.yaml"))
    return [body for file in files for body in yaml.safe_load_all(file.read_text()) if body]


def test_the_examples_fit_their_schemas() -> None:
    """A JobSet has no schema here: the Jobs in it are checked."""
    found = examples()
    jobs = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job["name"]},
            **job["template"],
        }
        for job in one(found, "JobSet")["spec"]["replicatedJobs"]
    ]
    for body in (*found, *jobs):
        if body["kind"] not in WITHOUT_SCHEMA:
            check_schema(body)

    assert {b["kind"] for b in found} == {
        *("JobSet", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap")
    }


def test_the_job_has_a_spare_and_finds_its_daemon(plain: list[Object]) -> None:
    """The socket of the chart's daemon, as one of its users."""
    (job,) = one(examples(), "JobSet")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command, daemon = " ".join(container["command"]), containers(plain)["daemon"]
    (nodes,), (grace,) = (re.findall(rf"--{n}=(\d+)", command) for n in ("nnodes", "grace"))
    (budget,) = (b["spec"] for b in examples() if b["kind"] == "PodDisruptionBudget")
    users = next(e["value"] for e in daemon["env"] if e["name"] == "TMD_HOST__USERS")
    (socket,) = (v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v)

    assert spec["parallelism"] == spec["completions"] == budget["minAvailable"] > int(nodes)
    assert int(grace) < pod["terminationGracePeriodSeconds"]
    assert {"cpu", "memory"} < container["resources"]["limits"].keys()
    assert str(pod["securityContext"]["runAsUser"]) in yaml.safe_load(users)
    assert socket == yaml.safe_load((CHART / "values.yaml").read_text())["daemon"]["runtimeDir"]
    assert {"TMD_HOST__NAME", "TMD_HOST__ADVERTISE", "TMD_HOST__RUNTIME_DIR"} <= {
        e["name"] for e in container["env"]
    }
