"""Installs a campaign's fault points in this process, and checks the functions they wrap."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tmd.campaign import points
from tmd.campaign.environment import FOLDER, RELAY
from tmd.fabric.dial import Caller
from tmd.trainer.checkpoints import archive
from tmd.trainer.checkpoints.saving import Saving
from tmd.trainer.session.session import Session
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.session.trace import Trace


def placed() -> Iterator[tuple[str, str]]:
    """Owner, as ``points`` writes it, and name of each function that it wraps."""
    for node in ast.walk(ast.parse(Path(points.__file__).read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("_before", "_after"):
            assert isinstance(node, ast.Call)
            owner, name, _ = node.args
            assert isinstance(name, ast.Constant)
            yield ast.unparse(owner), str(name.value)


def owner_of(expression: str) -> Any:
    """The object of that name. ``points`` imports what is about checkpoints within a function."""
    found: Any = {**vars(points), "archive": archive, "Saving": Saving}[
        expression.partition(".")[0]
    ]
    for name in expression.split(".")[1:]:
        found = getattr(found, name)
    return found


def misfits(folder: str) -> dict[str, str]:
    """Install the points. By wrapped function: why its point would fail, or an empty string.

    For a process of its own: nothing is ever put back.
    """
    os.environ.update({FOLDER: folder, RELAY: f"{folder}/relay"})
    talk = Caller._talk
    session = Session(StandaloneHooks(), Trace())
    points.Injector().follow(session)
    # Those at checkpoints are installed once a script asks for checkpoints.
    _parts(Session.checkpoint)["act"](session)
    found = {f"{o}.{n}": _misfit(owner_of(o), n) for o, n in placed()}
    return {**found, "Caller._talk": _unlike(Caller._talk, talk, first=1)}


def _misfit(owner: Any, name: str) -> str:
    outer, acts = getattr(owner, name), []
    while outer.__name__ == "wrapped":
        parts = _parts(outer)
        acts.append(parts["act"])
        outer = parts["inner"]
    if not acts:
        return "nothing stands there"
    first = 1 if inspect.isclass(owner) else 0
    return next(filter(None, (_unlike(act, outer, first=first) for act in acts)), "")


def _parts(wrapped: Callable[..., Any]) -> dict[str, Any]:
    """What a wrapper has closed over."""
    assert wrapped.__closure__ is not None
    return {
        name: cell.cell_contents
        for name, cell in zip(wrapped.__code__.co_freevars, wrapped.__closure__, strict=True)
    }


def _unlike(act: Callable[..., Any], inner: Callable[..., Any], *, first: int) -> str:
    """Why ``act`` cannot be called with what ``inner`` is called with.

    From ``first`` on, an argument of ``act`` must have the same name in ``inner``, unless its name
    is underscores alone: such an argument is not used.
    """
    taken = inspect.signature(inner).parameters.values()
    given = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in given if p.default is p.empty]
    wants = inspect.signature(act)
    for arguments in (needed, given):
        try:
            wants.bind(*arguments)
        except TypeError as error:
            return f"{error}: {inspect.signature(inner)}"
    named = [p.name for p in wants.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for mine, theirs in list(zip(named, given, strict=False))[first:]:
        if mine.strip("_") and mine != theirs.name:
            return f"takes {theirs.name} for {mine}"
    return ""
