"""Each point of a campaign stands before a function that is there and is called as it expects."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.campaign.placing import misfits, owner_of, placed
from tests.fabric.circle import circle
from tests.trainer.scripts import Script
from tests.trainer.tailing import pair
from tmd.campaign import fault_actions, job, points
from tmd.campaign.environment import ORDERS
from tmd.campaign.faults import KINDS
from tmd.campaign.points import ArmedFault, Injector
from tmd.campaign.scenario import POINTS

ROOT = Path(__file__).parents[2]
FAULT = re.compile(r"([a-z][a-z0-9-]*)@[^:\s\"'{}]+:[^=\s\"'{}]+=([a-z]+)")


@cache
def reached() -> set[str]:
    """Names of all points; of one with a number what comes before that. Scripts of tests may have
    points of their own."""
    found = set()
    files = [Path(points.__file__), Path(job.__file__), *(ROOT / "tests" / "e2e").rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "reach":
                assert isinstance(node, ast.Call)
                text = node.args[0]
                if isinstance(text, ast.JoinedStr):
                    text = text.values[0]
                assert isinstance(text, ast.Constant)
                found.add(str(text.value))
    return found


@cache
def struck() -> set[str]:
    """Whatever can be written behind the ``=`` of a fault."""
    tree = ast.parse(inspect.getsource(points))
    cases = (n.value for n in ast.walk(tree) if isinstance(n, ast.MatchValue))
    return {str(ast.literal_eval(value)) for value in cases} | fault_actions.ACTIONS.keys()


def is_reached(point: str) -> bool:
    return {point, re.sub(r"[0-9]+$", "", point)} & reached() != set()


def test_every_function_before_which_a_point_stands_is_there_and_fits(tmp_path: Path) -> None:
    """Put in place for real, in a process of its own; nothing is played."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(misfits, str(tmp_path)).result()

    assert {f"{owner}.{name}" for owner, name in placed()} < found.keys()
    assert {place: why for place, why in found.items() if why} == {}


def imported_by_name() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "tmd").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from ((node.module, alias.name) for alias in node.names)


def test_no_function_before_which_a_point_stands_is_imported_by_name() -> None:
    """A module's function is wrapped in the module: another name for it would pass by the point."""
    functions = {
        (owner_of(owner).__name__, name)
        for owner, name in placed()
        if inspect.ismodule(owner_of(owner))
    }

    assert functions & set(imported_by_name()) == set()
    assert len(functions) >= 4


@pytest.mark.parametrize("point", POINTS)
def test_every_point_that_a_scenario_may_name_is_reached(point: str) -> None:
    assert is_reached(point)


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.inside], ids=lambda k: k.name)
def test_every_kind_that_strikes_inside_strikes_with_something_known(kind: object) -> None:
    assert getattr(kind, "inside", "") in struck()


@pytest.mark.parametrize("folder", ["tests/e2e", "bench", "tmd/campaign"])
def test_every_fault_that_is_written_down_has_a_point_and_a_blow(folder: str) -> None:
    """In the tests of faults, in benchmarks and in the campaign itself."""
    written = {
        found
        for file in sorted((ROOT / folder).rglob("*.py"))
        for found in FAULT.findall(file.read_text())
    }

    assert {point for point, _ in written if not is_reached(point)} == set()
    assert {what for _, what in written} - struck() == set()


def test_a_fault_is_read_as_it_is_written() -> None:
    plain = ArmedFault.parse("writing-10@1:*=full")
    named = ArmedFault.parse("late between@*:45=wait")

    assert plain == ArmedFault("writing-10", "writing-10", "1", "*", "full")
    assert named == ArmedFault("late", "between", "*", "45", "wait")


def test_orders_that_follow_within_one_tick_of_the_clock_are_read(tmp_path: Path) -> None:
    """The time of the file does not tell them apart."""
    injector, orders = Injector(), tmp_path / ORDERS
    seen = []
    for line in ("backward@1:5=kill", "forward@1:5=kill"):
        draft = orders.with_suffix(".new")
        draft.write_text(f"{line}\n")
        os.utime(draft, ns=(1, 1))
        draft.replace(orders)
        injector._read_orders(tmp_path)
        seen += [fault.point for fault in injector._ordered]

    assert seen == ["backward", "forward"]


def test_without_a_folder_nothing_strikes() -> None:
    """A script of the campaign runs under plain Python, too."""
    injector = Injector()
    injector.reach("forward")

    assert injector._folder is None


@pytest.mark.parametrize("blow", [fault_actions.sever, fault_actions.isolate])
def test_links_are_really_broken(blow: object) -> None:
    assert callable(blow)
    with circle(3) as c:
        c.group()
        c.allreduce()
        standing = c.fabrics[0].standing
        assert standing is not None
        links = [link for _, link in standing.member_links()]
        blow(c.fabrics[0])

        assert len(links) > 1
        assert any(link.severed for link in links)
        assert all(link.severed for link in links) == (blow is fault_actions.isolate)


def test_one_bit_of_the_joiner_is_really_flipped() -> None:
    with pair(Script) as p:
        before = [param.clone() for param in p.joiner.units.params]
        fault_actions.flip(p.joiner.following)
        after = p.joiner.units.params
        differ = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if not a.equal(b)]

        assert differ == [0]
        assert (before[0].view(torch.int32) ^ after[0].detach().view(torch.int32)).sum() == 1
