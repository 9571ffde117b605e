"""The alert rules and the dashboard that ship with tmd name what its daemons report."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import rule_scenes
from tests.daemon.scraped import every_sample
from tests.marks import program
from tmd.cli import shipped
from tmd.core.planning.goodput import LossCause
from tmd.core.values.errors import ConfigError
from tmd.daemon.web.cluster_metrics import CLUSTER

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "monitoring"
PAGE = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "tmd-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "tmd-dashboard.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
QUERIES = [rule["expr"] for rule in RULES] + [target["expr"] for target in TARGETS]
OWN_LABELS = {"instance", "job"}
"""Of Prometheus itself."""


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Names of all samples that daemons report, and their labels."""
    found: dict[str, set[str]] = {}
    for sample in every_sample():
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def named(query: str) -> set[str]:
    """Names of metrics."""
    return set(re.findall(r"\btmd_\w+", query)) - {CLUSTER}


def test_every_metric_of_the_rules_and_the_dashboard_exists(samples: dict[str, set[str]]) -> None:
    """One that is misspelt would show nothing for ever."""
    names = {name for query in QUERIES for name in named(query)}

    assert len(names) > 20
    assert names - samples.keys() == set()


@pytest.mark.parametrize("query", QUERIES)
def test_every_label_of_a_query_is_one_of_its_metrics(
    query: str, samples: dict[str, set[str]]
) -> None:
    grouped = re.findall(r"\b(?:by|on) \(([\w, ]+)\)", query)
    asked = {label for group in grouped for label in re.split(r",\s*", group)}
    asked |= set(re.findall(r'[{,]\s*(\w+)\s*=~?"', query))
    known = {label for name in named(query) for label in samples[name]}

    assert asked - known - OWN_LABELS == set()


def test_every_text_of_a_rule_uses_labels_that_its_query_keeps() -> None:
    for rule in RULES:
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = re.findall(r"\bby \(([\w, ]+)\)", rule["expr"])
        if kept:
            assert used <= set(re.split(r",\s*", kept[0])), rule["alert"]


def test_every_alert_links_to_its_runbook() -> None:
    """A heading of the page, for each rule, and no other one."""
    headings = re.findall(r"^### (Tmd\w+)$", PAGE, re.MULTILINE)
    links = [rule["annotations"]["runbook_url"] for rule in RULES]

    assert headings == [rule["alert"] for rule in RULES]
    assert links == [
        f"{shipped.DOCUMENTATION}/operate/monitoring.html#{rule['alert'].lower()}" for rule in RULES
    ]


def test_the_page_describes_every_metric(samples: dict[str, set[str]]) -> None:
    """Each with its labels, and no metric that does not exist."""
    rows = re.findall(r"^\| `(tmd_\w+)(?:\{([\w,]+)\})?` \|", PAGE, re.MULTILINE)
    shown = {name: set(filter(None, labels.split(","))) for name, labels in rows}
    parts = re.compile(r"_(bucket|count|sum)$")
    real = {parts.sub("", name): labels - {"le"} for name, labels in samples.items()}

    assert shown == real


def test_the_page_describes_every_cause_of_lost_time() -> None:
    assert [c for c in LossCause if f"\n| `{c}` |" not in PAGE] == []


def test_no_panel_covers_another_one() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(24))


def test_promtool_takes_the_rules() -> None:
    promtool = program("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "check", "rules", str(FOLDER / "tmd-alerts.yml")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_the_rules_fire_and_rest_as_they_should(tmp_path: Path) -> None:
    """On what daemons report; promtool evaluates the rules as Prometheus does."""
    promtool = program("promtool", "prometheus")
    texts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in RULES}
    scenes = rule_scenes.every_scene()
    for scene in scenes:
        for case in scene["alert_rule_test"]:
            for expected in case.get("exp_alerts", ()):
                expected["exp_annotations"]["runbook_url"] = texts[case["alertname"]]
    file = tmp_path / "scenes.yml"
    of_file = {"rule_files": [str(FOLDER / "tmd-alerts.yml")], "evaluation_interval": "30s"}
    file.write_text(json.dumps({**of_file, "tests": scenes}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    fired = {
        case["alertname"]
        for scene in scenes
        for case in scene["alert_rule_test"]
        if "exp_alerts" in case
    }

    assert done.returncode == 0, done.stdout + done.stderr
    assert fired == texts.keys()


@pytest.mark.parametrize("index", range(len(TARGETS)))
def test_promtool_can_parse_each_query_of_the_dashboard(index: int, tmp_path: Path) -> None:
    promtool = program("promtool", "prometheus")
    query = re.sub(r"\$__(rate_interval|range)", "5m", TARGETS[index]["expr"])
    query = query.replace("$training_job", ".+").replace("$cluster", ".+")
    rule = {"record": "a:b", "expr": query}
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


# --- tmd monitoring install -----------------------------------------------------------------------


def test_the_installed_rules_link_to_the_operators_documentation(tmp_path: Path) -> None:
    rules, dashboard = shipped.monitoring(tmp_path, "https://intra/tmd/")

    assert "docs.example" not in rules.text
    assert "https://intra/tmd/operate/monitoring.html#tmdnoleader" in rules.text
    assert json.loads(dashboard.text) == DASHBOARD


@pytest.mark.parametrize("address", ["", "intra/tmd", 'https://a"b', "https://a b"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--docs"):
        shipped.monitoring(tmp_path, address)
