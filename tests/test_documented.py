"""The README says what the code does: phases, verbs, tests, configuration."""

import ast
import re
from pathlib import Path

import pytest

from tmd.core.planning.migration import TABLE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
LAYOUTS = (ROOT / "docs" / "layouts.md").read_text()


def diagram() -> str:
    """The table as a Mermaid diagram; ``python -m tests.test_documented`` prints it."""
    edges = [
        f"    {phase} --> {after}: {event}"
        for phase, row in TABLE.items()
        for event, after in row.items()
    ]
    starts = ["    [*] --> prepare: a drain", "    [*] --> recover: a loss"]
    return "\n".join(["```mermaid", "stateDiagram-v2", *starts, *edges, "```"])


def test_the_diagram_is_the_table() -> None:
    """Whoever changes the table changes the picture."""
    assert diagram() in README


def test_every_test_named_in_the_failure_table_exists() -> None:
    """Each row points to what proves it."""
    named = set(re.findall(r"`(test_\w+(?:\[[^\]`]*\])?)`", README + SECURITY + LAYOUTS))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in (node.name, *(f"{node.name}[{each}]" for each in parameters(node)))
    }

    assert len(named) > 10
    assert sum("[" in name for name in named) > 5
    assert named - written == set()


def parameters(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Ids of its variants, as far as they are written down beside it."""
    told = [
        part
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.parametrize"
        for part in (*mark.args[1:], *(k.value for k in mark.keywords if k.arg == "ids"))
        if isinstance(part, ast.List | ast.Tuple)
    ]
    # pytest.param(value, marks=...)
    values = [e.args[0] if isinstance(e, ast.Call) and e.args else e for p in told for e in p.elts]
    return [str(value.value) for value in values if isinstance(value, ast.Constant)]


def test_every_verb_is_named() -> None:
    """A verb that nobody can find does not exist."""
    from typer.main import get_command

    from tmd.cli import app

    command = get_command(app)
    verbs = command.list_commands(None)  # type: ignore[attr-defined, arg-type]

    assert [v for v in verbs if f"tmd {v}" not in README and f"`{v}" not in README] == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w/.-]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    """Relative links of the README exist; a bare file name lies beside the link before it."""
    places = [ROOT, *(ROOT / d for d in ("tmd/core", "tmd/trainer", "tmd/fabric", "tmd/daemon"))]

    assert any((place / link).exists() for place in places)


if __name__ == "__main__":
    print(diagram())


def test_the_plugins_in_the_readme_are_the_ones_that_are_tested() -> None:
    """Whoever copies them gets what the tests install and load."""
    file = ROOT / "tests" / "plugins" / "example_distribution" / "tmd_example.py"
    code = file.read_text()

    assert code[code.index("import os") :].rstrip() in README


def test_the_stages_in_the_map_of_layouts_are_the_ones_that_are_tested() -> None:
    """Whoever copies them gets what is moved, killed and compared bit for bit."""
    code = (ROOT / "tests" / "e2e" / "stages.py").read_text()
    examples = re.findall(r"```python\n(.*?)\n```", LAYOUTS, re.DOTALL)

    assert len(examples) == 2
    assert [e for e in examples if e not in code and e not in dedented(code)] == []


def dedented(code: str) -> str:
    """The bodies of functions, at the left margin."""
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


def test_every_detector_and_policy_is_named() -> None:
    """A table row for each detector, a word for each policy."""
    from tmd.daemon.plugins import installed
    from tmd.plugin import DETECTOR_GROUP, POLICY_GROUP

    names = {p.name for group in (DETECTOR_GROUP, POLICY_GROUP) for p in installed(group)}

    assert len(names) > 10
    assert [n for n in sorted(names) if f"`{n}`" not in README] == []
