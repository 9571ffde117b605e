"""The documentation says what the code does: machines, verbs, keys, codes, tests, names."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from docs.generate import codes, configuration, figures, machines, sequences, terminal, verbs
from docs.generate.parts import MARKER, PARTS, filled
from docs.generate.pictures import FOLDER, PICTURES
from tmd.core.planning import migration
from tmd.core.worker import transitions
from tmd.extras import DISTRIBUTION
from tmd.fabric import unfinished_step
from tmd.fabric.generations import states

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
README = (ROOT / "README.md").read_text()
WRITTEN = {**PAGES, "README.md": README}
LAYOUTS = PAGES["guarantees/layouts.md"]
DOTTED = re.compile(r"`((?:tmd|tmd_detectors|tmd_policies|tmd_systemd|tmd_monitoring)(?:\.\w+)+)`")
NO_NAMES = {"tmd.detectors", "tmd.policies", "tmd.toml", "tmd.service"}
"""Groups of entry points, and files."""
PACKAGES = ("tmd", "detectors", "policies")


def page(name: str) -> str:
    """A page as its readers see it."""
    return filled(PAGES[name])


TABLES: dict[str, Any] = {
    "plan": migration.TABLE,
    "worker": transitions.TABLE,
    "generation": states.TABLE,
    "step": unfinished_step.TABLE,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_table_of_a_machine_is_its_table(table) -> None:
    """Each legal transition stands on the page, and no other does."""
    shown = re.findall(r"^\| (.+?) \| \w: (.+?) \| (.+?) \|$", page("how/machines.md"), re.M)
    legal = {(b, e, a) for b, row in table.items() for e, a in row.items()}
    events = {event for row in table.values() for event in row}

    assert {row for row in shown if row[1] in events and row[0] in {*table}} >= legal
    assert len(shown) == sum(len(row) for each in TABLES.values() for row in each.values())


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_committed_picture_is_what_its_source_says(name: str) -> None:
    """A change of a table or a figure changes its picture: ``python -m docs.generate.pictures``."""
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name]()


def test_the_picture_of_a_machine_shows_every_state_and_transition() -> None:
    """A box for each state, an arrow for each pair of states."""
    drawn = machines.plan_picture()
    pairs = {(before, after) for before, row in migration.TABLE.items() for after in row.values()}

    assert [s for s in migration.TABLE if f">{s}</text>" not in drawn] == []
    assert drawn.count("marker-end") == len(pairs)


@pytest.mark.parametrize("name", sorted(sequences.PAGES))
def test_each_line_of_a_sequence_is_drawn_and_names_its_function(name: str) -> None:
    """The picture is the table of the page."""
    source = PAGES[sequences.PAGES[name][0]]
    rows = re.findall(r"^\| \d+ \|.*$", source, re.M)

    assert len(rows) == len(sequences.messages(sequences.PAGES[name][0])) > 10
    assert [row for row in rows if not DOTTED.search(row)] == []


def test_the_picture_of_the_demo_is_what_the_demo_prints() -> None:
    """The report and its verdict, without anything from the network."""
    drawn = (FOLDER / "demo.svg").read_text().replace("&#160;", " ")

    assert "losses identical to an undisturbed run:" in drawn
    assert "What each event cost" in drawn
    assert re.findall(r"https?://[^\s\"<)]+", drawn) == ["http://www.w3.org/2000/svg"]


def test_a_recorded_terminal_shows_its_fullest_frame_and_its_end() -> None:
    """A live display erases its lines before it draws them anew."""
    frame = "\r\x1b[2K\x1b[1A\x1b[2K"
    recorded = f"Redis: a server\r\nstep 1\r\nhost-1{frame}step 2\r\nhost-1 training{frame}done\r\n"

    drawn = terminal.picture(recorded, "tmd demo").replace("&#160;", " ")

    assert [
        words in drawn for words in ("Redis: a server", "step 2", "host-1 training", "done")
    ] == [True] * 4
    assert "step 1" not in drawn


def resolved(name: str) -> object:
    """The module, class or function of a dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(parts[:cut]).startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            known = getattr(found, "__annotations__", {})
            found = getattr(found, part) if hasattr(found, part) else known[part]
        return found
    raise ModuleNotFoundError(name)


def test_every_name_of_the_code_resolves() -> None:
    """Modules, classes and functions that pages name exist."""
    named = {name for text in WRITTEN.values() for name in DOTTED.findall(text)} - NO_NAMES
    lost = []
    for name in sorted(named):
        try:
            resolved(name)
        except (ImportError, AttributeError, KeyError) as error:
            if "run pip install 'tmd" not in str(error):  # there, and its framework is not
                lost.append(f"{name}: {error!r}")

    assert len(named) > 150
    assert lost == []


def test_every_file_that_is_named_exists() -> None:
    """Paths of the repository in backticks lead somewhere."""
    pattern = re.compile(
        r"`((?:tmd|detectors|policies|docs|tests|bench|examples|systemd|monitoring|packaging)/[\w/.-]+)`"
    )
    named = {path for text in WRITTEN.values() for path in pattern.findall(text)}

    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_every_test_that_is_named_exists() -> None:
    """Each row of the tables of failures, layouts and bounds points to what proves it."""
    texts = "".join(WRITTEN.values())
    named = set(re.findall(r"`(test_\w+(?:\[[^\]`]*\])?)`", texts))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in (node.name, *(f"{node.name}[{each}]" for each in parameters(node)))
    }

    assert len(named) > 100
    assert sum("[" in name for name in named) > 5
    assert named - written == set()


def parameters(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Ids of its variants, as far as they are written down beside it."""
    lists = [
        part
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize"
        for part in (*mark.args[1:], *(k.value for k in mark.keywords if k.arg == "ids"))
        if isinstance(part, ast.List | ast.Tuple)
    ]
    # pytest.param(value, marks=...)
    values = [e.args[0] if isinstance(e, ast.Call) and e.args else e for p in lists for e in p.elts]
    return [str(value.value) for value in values if isinstance(value, ast.Constant)]


@pytest.mark.parametrize("name", ["guarantees/failures.md", "guarantees/layouts.md"])
def test_every_row_of_failures_and_layouts_names_a_test(name: str) -> None:
    """A claim without a test is none; a row that refers to another one has its words."""
    rows = [row for row in PAGES[name].splitlines() if re.match(r"^\| (?!-|dies|layout)", row)]
    named = [row for row in rows if "`test_" in row]

    assert len(named) >= len(rows) - 1  # gradients summed by hand: as DDP
    assert len(rows) > 15


def test_every_verb_has_its_entry() -> None:
    """Each verb has a section of its own."""
    shown = page("operate/commands.md")

    assert len(list(verbs.every())) > 20
    assert [name for name, _ in verbs.every() if f"\n## {name}\n" not in shown] == []


def test_every_option_of_a_verb_has_its_entry() -> None:
    """By the verb that has it."""
    sections = dict(
        re.findall(r"^## (tmd [\w -]+)\n(.*?)(?=^## |\Z)", page("operate/commands.md"), re.M | re.S)
    )
    lost = [
        f"{name} {option}"
        for name, command in verbs.every()
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden
        for option in parameter.opts
        if f"`{option}" not in sections[name]
    ]

    assert lost == []


def test_every_key_of_the_configuration_has_its_entry() -> None:
    """Sections, detectors and policies: each key in the table of its section, with its meaning."""
    shown = page("operate/configuration.md")
    sections = dict(re.findall(r"^## \[([\w.]+)\]\n(.*?)(?=^## |\Z)", shown, re.M | re.S))
    keys = configuration.every_key()

    assert len(keys) > 90
    assert [k.path for k in keys if f"| `{k.name}` |" not in sections[k.section]] == []
    assert [k.path for k in keys if not k.meaning] == []


def test_every_key_of_the_sample_configuration_is_in_the_reference() -> None:
    """What the shipped file shows is what the code reads."""
    import tomllib

    sample = tomllib.loads((ROOT / "systemd" / "tmd.toml").read_text())
    known = {key.path for key in configuration.every_key()}
    common = {key.name for key in configuration.every_key() if key.section == "detectors.NAME"}
    found = {
        f"{section}.{key}" if not isinstance(value, dict) else f"{section}.{key}.{inner}"
        for section, keys in sample.items()
        for key, value in keys.items()
        for inner in (value if isinstance(value, dict) else [""])
    }

    assert len(found) > 40
    assert {f for f in found - known if f.rpartition(".")[2] not in common} == set()


def test_every_code_of_an_alert_has_its_row_in_the_runbook() -> None:
    """Meaning, evidence, what tmd does, what you do: six full cells."""
    rows = [row.split(" | ") for row in PAGES["operate/runbook.md"].splitlines()]
    shown = {row[0].strip("| `"): row for row in rows if row[0].startswith("| `")}

    assert len(codes.raised()) > 60
    assert codes.raised() - shown.keys() == set()
    assert shown.keys() - codes.raised() == set()
    assert [code for code, row in shown.items() if len(row) != 6 or not all(row)] == []


def test_every_generated_part_stands_on_one_page() -> None:
    """No marker without its part, no part without its page, none twice."""
    asked = [name for text in PAGES.values() for name in MARKER.findall(text)]

    assert sorted(asked) == sorted(PARTS)


def test_every_figure_of_the_readme_is_measured() -> None:
    """The medians in the README's table, and below it, are those of the results."""
    shown = re.search(r"## Four figures\n(.*?)\n!\[", README, re.S)
    medians = {
        f"{figures.facts(row)['median']:.2f} s"
        for row in (
            *figures.KILL,
            figures.Row("", "pause", ("shadow 10M", "pause_s")),
            figures.Row("", "pause", ("shadow 10M", "median_step_s")),
            figures.Row("", "restart", ("torchrun 10M", "pause_s")),
            figures.Row("", "hot", ("hot 10M", "set_back_s")),
            figures.Row("", "hot", ("repeat 10M", "set_back_s")),
            figures.Row("", "hot", ("hot 10M", "median_step_s")),
            figures.Row("", "gpu", ("moves", "pause_s")),
            figures.Row("", "gpu", ("kill -9", "downtime_s")),
            figures.Row("", "gpu", ("kill -9", "median_step_s")),
        )
    }

    assert shown is not None
    assert len(re.findall(r"-?[\d.]+ s\b", shown[1])) == 13
    assert set(re.findall(r"-?[\d.]+ s\b", shown[1])) - medians == set()


def test_no_page_has_the_marks_of_a_merge_that_is_not_resolved() -> None:
    marks = re.compile(r"^(?:<{7} |={7}$|>{7} )", re.M)

    assert [name for name, text in WRITTEN.items() if marks.search(text)] == []


def test_the_readme_is_short() -> None:
    """What is worth more words has a page."""
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w/.-]+)\)", README))))
def test_links_of_the_readme_lead_somewhere(link: str) -> None:
    """MkDocs checks those of the pages."""
    assert (ROOT / link).exists()


def test_every_page_can_be_reached() -> None:
    """By the navigation of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text()

    assert [name for name in PAGES if f": {name}\n" not in navigation] == []


def test_every_detector_and_policy_is_named() -> None:
    """A table row for each."""
    from tmd.daemon.plugins import installed
    from tmd.plugin import DETECTOR_GROUP, POLICY_GROUP

    points = [p for group in (DETECTOR_GROUP, POLICY_GROUP) for p in installed(group)]
    names = {p.name for p in points if p.dist is not None and p.dist.name == DISTRIBUTION}

    assert len(names) > 10
    assert [n for n in sorted(names) if f"\n| `{n}` |" not in PAGES["operate/detectors.md"]] == []


def test_the_plugins_on_the_page_are_the_ones_that_are_tested() -> None:
    """The code on the page is the code that the tests install and load."""
    file = ROOT / "tests" / "plugins" / "example_distribution" / "tmd_example.py"
    code = file.read_text()

    assert code[code.index("import os") :].rstrip() in page("extend/detector.md")


def test_the_stages_in_the_page_of_layouts_are_the_ones_that_are_tested() -> None:
    """The code on the page is the code whose ranks are moved, killed and compared."""
    code = (ROOT / "tests" / "e2e" / "stages.py").read_text()
    examples = re.findall(r"```python\n(.*?)\n```", LAYOUTS, re.DOTALL)

    assert len(examples) == 2
    assert [e for e in examples if e not in code and e not in dedented(code)] == []


def dedented(code: str) -> str:
    """The bodies of functions, at the left margin."""
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


def test_every_invariant_that_the_code_cites_is_stated() -> None:
    """I1 to I9, each once."""
    stated = re.findall(r"^<a id=\"i(\d)\"></a>I\1 ", PAGES["how/design.md"], re.M)
    cited = {
        number
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for number in re.findall(r"\bI([1-9])\b", file.read_text())
    }

    assert stated == [str(number) for number in range(1, 10)]
    assert cited - {*stated} == set()
