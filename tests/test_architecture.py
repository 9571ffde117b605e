"""Budgets and shape of the tree, so that nothing grows quietly."""

import ast
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = [f for d in ("tmd", "detectors", "policies") for f in sorted((ROOT / d).rglob("*.py"))]
LONGEST_FILE = 400
LONGEST_FUNCTION = 50


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_files_stay_small() -> None:
    """No file above 400 lines, the median at most 150."""
    sizes = {str(f.relative_to(ROOT)): lines(f) for f in PRODUCT if lines(f)}

    assert {f: n for f, n in sizes.items() if n > LONGEST_FILE} == {}
    assert statistics.median(sizes.values()) <= 150


def test_functions_stay_short() -> None:
    """No function above 50 lines."""
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for file in PRODUCT
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    }

    assert long == {}


def parameters(function: ast.FunctionDef) -> int:
    """Without ``self``."""
    return len(function.args.args) - 1 + len(function.args.kwonlyargs)


def test_constructors_take_few_parameters() -> None:
    """At most six: what belongs together is a value of its own."""
    many = {
        f"{file.relative_to(ROOT)} {kind.name}": parameters(method)
        for file in PRODUCT
        for kind in ast.walk(ast.parse(file.read_text()))
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if parameters(method) > 6
    }

    assert many == {}


def test_every_package_says_what_it_is_for() -> None:
    """In a paragraph of at least 15 words."""
    short = {
        str(file.relative_to(ROOT)): words
        for file in PRODUCT
        if file.name == "__init__.py"
        if (words := len((ast.get_docstring(ast.parse(file.read_text())) or "").split())) < 15
    }

    assert short == {}


MIRRORED = {"Trainer"}
"""Classes that have the name of the framework's own, by which scripts import them."""


def public_types(file: Path) -> Iterator[str]:
    """Public classes, and public aliases of types, at the top level of ``file``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = "" if is_type_variable(node.value) else node.targets[0].id
        else:
            continue
        if name[:1].isupper() and not name.isupper():
            yield name


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"


def test_no_two_public_types_have_one_name() -> None:
    """A reader who searches for a name finds one definition."""
    found = defaultdict(list)
    for file in PRODUCT:
        for name in public_types(file):
            found[name].append(str(file.relative_to(ROOT)))

    assert len(found) > 700
    assert {n: files for n, files in found.items() if len(files) > 1 and n not in MIRRORED} == {}
    assert {n for n in MIRRORED if len(found[n]) < 2} == set()


def test_every_package_is_packaged() -> None:
    """The explicit list in pyproject is the tree."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        "tmd": "tmd",
        "detectors": "tmd_detectors",
        "policies": "tmd_policies",
        "systemd": "tmd_systemd",
        "monitoring": "tmd_monitoring",
    }
    found = {
        ".".join((folders[place], *f.parent.relative_to(ROOT / place).parts))
        for place in folders
        for f in (ROOT / place).rglob("__init__.py")
    }

    assert set(listed) == found


@pytest.mark.parametrize("package", ["planning", "alerts"])
def test_every_decision_has_a_test_file_of_its_own(package: str) -> None:
    modules = {f.stem for f in (ROOT / "tmd" / "core" / package).glob("[!_]*.py")}
    tested = {f.stem.removeprefix("test_") for f in (ROOT / "tests" / "core").glob("test_*.py")}

    assert modules - tested == set()


def test_plug_ins_are_loaded_by_their_import_name_only() -> None:
    """The folder names would make a second copy of each class."""
    for group in ("tmd.detectors", "tmd.policies"):
        for point in entry_points(group=group):
            point.load()

    assert "detectors" not in sys.modules
    assert "policies" not in sys.modules


def test_nothing_of_ours_pickles_or_evaluates() -> None:
    """No pickle, marshal, eval, exec or shell in the product."""
    banned = {"pickle", "marshal", "shelve", "cloudpickle"}
    found = []
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name in banned]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module] if node.module in banned else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in ("eval", "exec") else []
            found += [f"{file.name}:{n}" for n in names]

    assert found == []


def test_verbs_print_through_one_door_only() -> None:
    """Whatever else writes to a terminal could be told by a host to reset it, or lie."""
    banned = {"print", "echo", "secho", "Console", "Text"}
    found = []
    for file in sorted((ROOT / "tmd" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in banned or (name == "write" and "std" in ast.unparse(called)):
                found.append(f"{file.name}:{node.lineno} {name}")

    assert {f.partition(":")[0] for f in found} == {"output.py"}


class StatedTest(NamedTuple):
    """What two tests ask of each test; not its tree, which takes memory."""

    where: str
    asserts: bool
    states_claim: bool


@cache
def all_tests() -> list[StatedTest]:
    return [
        StatedTest(
            f"{file.relative_to(ROOT)}:{node.lineno} {node.name}",
            asserts(node),
            bool(ast.get_docstring(node)) or node.name.count("_") >= 3,
        )
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
    ]


def asserts(test: ast.AST) -> bool:
    """Whether ``test`` can fail by what it finds; of a helper its name says so."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("raises", "warns") or name.startswith(("assert_", "expect", "check_")):
                return True
    return False


def test_every_test_asserts_something() -> None:
    """One that only runs code passes whatever the code does."""
    found = all_tests()

    assert len(found) > 1000
    assert [test.where for test in found if not test.asserts] == []


OURS = ("tmd", "tmd_detectors", "tmd_policies")


def replaced(file: Path) -> Iterator[str]:
    """Parts of our own modules that the tests in ``file`` replace."""
    tree = ast.parse(file.read_text())
    ours = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            ours |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        target = ast.unparse(node.args[0]).strip("'\"")
        root = target.partition(".")[0]
        if name in ("setattr", "delattr", "object", "patch") and root in {*ours, *OURS}:
            yield f"{file.relative_to(ROOT)}:{node.lineno} {target}"


def test_no_test_replaces_a_part_of_our_modules() -> None:
    """A test that does so proves nothing of the code as it runs. It may give it other values."""
    found = [each for file in sorted((ROOT / "tests").rglob("*.py")) for each in replaced(file)]

    assert found == []


def test_every_test_states_its_claim() -> None:
    """In a docstring, or in a name of at least three words."""
    assert [test.where for test in all_tests() if not test.states_claim] == []
