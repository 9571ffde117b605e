"""A script whose loop decides by the rank that it had at its start is named; others are not."""

from __future__ import annotations

import ast
import linecache
import logging
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from tests.trainer.standalone import Voting
from tmd.trainer import Session
from tmd.trainer.session.kept_rank import kept_rank

ROOT = Path(__file__).parents[2]
BATCHES = "session.batches(range(1))"
GIVEN_UP = "the script is not searched for a kept rank"
"""Logged if the search has failed."""


class Noting(Voting):
    def __init__(self, *, shadowing: bool = False) -> None:
        super().__init__()
        self.found: list[str] = []
        self.shadowing = shadowing

    def warn(self, **found: str) -> None:
        self.found += [f"{field}: {words}" for field, words in found.items()]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def run(source: str, *, shadowing: bool = False) -> list[str]:
    """What is found in a script of ``source``, which has a session, as it runs."""
    hooks, model = Noting(shadowing=shadowing), nn.Linear(1, 1)
    session = Session(hooks)
    session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))
    text = textwrap.dedent(source)
    name = "/script/train.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {"session": session, "hooks": hooks, "dist": dist, "__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return hooks.found


KEPT = {
    "a flag": """
        master = dist.get_rank() == 0
        for number in session.batches(range(1)):
            if master and number:
                print(number)
        """,
    "the rank itself": """
        def main():
            rank, size = session.rank, 1
            for number in session.batches(range(1)):
                if rank == 0:
                    print(number)
        main()
        """,
    "a variable of the environment": """
        import os
        rank = int(os.environ["RANK"])
        is_main = not rank
        for number in session.batches(range(1)):
            print(number) if is_main else None
        """,
    "after the loop": """
        def train():
            main = session.rank == 0
            for epoch in range(1):
                for number in session.batches(range(1)):
                    pass
            if main:
                print("saved")
        train()
        """,
    "in the loop over epochs": """
        master = session.rank == 0
        for epoch in range(1):
            if master:
                print(epoch)
            for number in enumerate(session.batches(range(1))):
                pass
        """,
    "in a function that the loop calls": """
        MASTER = session.rank == 0
        def say(number):
            if MASTER:
                print(number)
        def step(number):
            say(number)
        def main():
            for number in session.batches(range(1)):
                step(number)
        main()
        """,
    "in an object": """
        class Trainer:
            def __init__(self, session):
                self.session = session
                self.master = session.rank == 0
            def log(self):
                if self.master:
                    print("step")
            def train(self):
                for number in self.session.batches(range(1)):
                    self.log()
        Trainer(session).train()
        """,
    "beside a variable of a function": """
        master = session.rank == 0
        def say(number):
            master = number > 3
            print(master)
        for number in session.batches(range(1)):
            say(number)
            if master:
                print(number)
        """,
    "a writer of one rank": """
        writer = print if session.rank == 0 else None
        for number in session.batches(range(1)):
            if writer:
                writer(number)
        """,
}
SANE = {
    "asked each time": """
        master = session.rank == 0
        if master:
            print("begin")
        for number in session.batches(range(1)):
            if session.rank == 0 and not session.shadowing:
                print(number)
        """,
    "set anew in the loop": """
        master = session.rank == 0
        for number in session.batches(range(1)):
            master = session.rank == 0
            if master:
                print(number)
        """,
    "a device and a seed": """
        rank = dist.get_rank()
        device, seed = rank % 8, 3 + rank
        for number in session.batches(range(1)):
            print(number, device, rank)
        """,
    "another variable of the name": """
        master = session.rank == 0
        def say(master):
            if master:
                print("step")
        def main():
            master = True
            for number in session.batches(range(1)):
                if master:
                    say(session.rank == 0)
        main()
        """,
    "the rank of something else": """
        class Matrix:
            rank = 3
        full = Matrix.rank == 3
        for number in session.batches(range(1)):
            if full:
                print(number)
        """,
    "set anew in the loop, and used by a helper": """
        master = session.rank == 0
        def say(number):
            if master:
                print(number)
        for number in session.batches(range(1)):
            master = session.rank == 0
            say(number)
        """,
    "set anew by a function": """
        master = session.rank == 0
        def refresh():
            global master
            master = session.rank == 0
        for number in session.batches(range(1)):
            refresh()
            if master:
                print(number)
        """,
    "set anew by a method": """
        class Trainer:
            def __init__(self):
                self.refresh()
            def refresh(self):
                self.master = session.rank == 0
            def train(self):
                for number in session.batches(range(1)):
                    self.refresh()
                    if self.master:
                        print(number)
        Trainer().train()
        """,
    "a place in a mesh": """
        class Mesh:
            def get_rank(self):
                return 0
        first = Mesh().get_rank() == 0
        mesh = Mesh()
        second = mesh.get_rank() == 0
        for number in session.batches(range(1)):
            if first or second:
                print(number)
        """,
    "a function that asks": """
        def master():
            return session.rank == 0
        for number in session.batches(range(1)):
            if master():
                print(number)
        """,
}


@pytest.mark.parametrize("source", KEPT.values(), ids=KEPT)
def test_a_loop_that_decides_by_an_old_rank_is_named(source: str) -> None:
    """With the line that decides and the one that has asked."""
    (found,) = run(source)
    assert found.startswith("rank_kept: /script/train.py:")
    assert "Ask session.rank each time" in found


def test_the_lines_are_those_of_the_script() -> None:
    (found,) = run(KEPT["a flag"])
    assert "train.py:4 decides by 'master', which line 2 has set" in found


@pytest.mark.parametrize("source", SANE.values(), ids=SANE)
def test_other_uses_of_the_rank_are_not(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tmd.trainer")
    assert run(source) == []
    assert GIVEN_UP not in caplog.text


SCRIPTS = [
    *(ROOT / "examples").glob("*/train.py"),
    *(ROOT / "tmd" / "integrations").rglob("*.py"),
    ROOT / "tmd" / "campaign" / "job.py",
    ROOT / "tmd" / "demo" / "train.py",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_that_are_ported_well_are_not_named(
    script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tmd.trainer")
    lines = script.read_text().splitlines()
    session = Session(Voting())
    for number in (n for n, line in enumerate(lines, 1) if ".batches(" in line):
        code = SimpleNamespace(co_filename=str(script))
        frame = SimpleNamespace(f_code=code, f_lineno=number, f_globals={}, f_locals={})
        assert kept_rank(frame, session) == ""  # type: ignore[arg-type]
    assert GIVEN_UP not in caplog.text


def test_a_standby_does_not_warn() -> None:
    """The worker of rank 0 runs the same script, and warns."""
    assert run(KEPT["a flag"], shadowing=True) == []


def test_a_worker_that_takes_rank_0_warns_once() -> None:
    """The alert of the former one has ended with it."""
    found = run(
        """
        master = session.rank == 0
        for number in session.batches(range(1)):
            session.step()
            assert not hooks.found
            hooks.shadowing = False
            session.step()
            session.step()
            if master:
                print(number)
        """,
        shadowing=True,
    )
    assert len(found) == 1


def test_a_search_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tmd.trainer")
    monkeypatch.setattr(ast, "parse", lambda _: 1 / 0)
    assert run(KEPT["a flag"]) == []
    assert GIVEN_UP in caplog.text


def test_a_file_that_cannot_be_read_stops_nothing() -> None:
    assert run("exec('for number in session.batches(range(1)): pass')") == []


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (f"for n, b in enumerate({BATCHES}): break", 1),
        (f"def train():\n  for n, b in enumerate(\n    {BATCHES}): break\ntrain()", 2),
        (f"for n, b in zip(range(1), {BATCHES}): break", 1),
        (f"import itertools\nfor b in itertools.islice({BATCHES}, 1): break", 2),
        ("for b in session.batches(list(enumerate(range(1)))): break", 0),
        (f"for b in {BATCHES}:\n  for n, x in enumerate([b]): break\n  break", 0),
    ],
    ids=["in the script", "in a function", "zip", "islice", "inside", "another loop"],
)
def test_a_loop_that_counts_its_batches_is_warned_of(
    loop: str, line: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A repeated step would count twice, and a joiner begins at 0."""
    run(loop)

    assert (f"train.py:{line} counts the batches" in caplog.text) is bool(line)
    assert GIVEN_UP not in caplog.text
