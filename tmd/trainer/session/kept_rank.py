"""Finds the line where a script's loop still decides by the rank that it read before the loop.

A worker's rank changes while the job runs. A script that sets ``master = rank == 0`` once goes on
to log and save by it. After a move no worker logs, or two do, and no comparison of numbers shows
it. So the source of the file with the loop is parsed once, and nothing is watched while steps run.
The search does not see a value that is passed to a function or an object, or kept in another file.
"""

from __future__ import annotations

import ast
import linecache
import logging
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tmd.trainer.session.hooks import StepHooks
    from tmd.trainer.session.session import Session

LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
GET_RANK = ("get_rank", "dist.get_rank", "torch.distributed.get_rank")
COUNTERS = ("enumerate", "zip", "islice", "itertools.islice")
ENVIRONMENT = ("getenv", "os.getenv", "environ.get", "os.environ.get")

log = logging.getLogger("tmd.trainer")


class VariableKind(Enum):
    RANK = auto()
    ANSWER = auto()
    """Whether it is some rank."""


class KeptVariable(NamedTuple):
    """A variable that was set from the rank."""

    kind: VariableKind
    line: int


KnownVariables = dict[str, KeptVariable]


def kept_rank(frame: FrameType, session: object) -> str:
    """Where the loop that calls ``batches`` in ``frame`` decides by an old rank, in words; empty if
    it does not, as far as its file shows."""
    try:
        return _Script(frame, session, _tree(frame)).finding()
    except Exception as error:
        # Any source may be here, and none may stop the job.
        log.debug("the script is not searched for a kept rank: %s", error)
        return ""


def counted_loop(frame: FrameType) -> str:
    """Where the loop that calls ``batches`` in ``frame`` counts its batches, in words; empty if it
    does not."""
    try:
        trail = next(_trails(_tree(frame), frame.f_lineno), [])
    except Exception as error:
        log.debug("the script is not searched for a loop that counts: %s", error)
        return ""
    match trail[-1:]:
        case [ast.For(iter=ast.Call(func=how), lineno=line)] if ast.unparse(how) in COUNTERS:
            return (
                f"{frame.f_code.co_filename}:{line} counts the batches of session.batches() by "
                f"{ast.unparse(how)}(): it counts a repeated step twice, and begins anew on a "
                "worker that joins. Number and limit them by session.position.index"
            )
    return ""


class KeptRankReport:
    """Reports once where a script decides by an old rank, or counts its batches itself."""

    def __init__(self, session: Session, hooks: StepHooks) -> None:
        self._session, self._hooks = session, hooks
        self._found: str | None = None
        """``None`` before the search; empty if nothing is found, or once it is reported."""

    def search(self, frame: FrameType) -> None:
        """Search the file of ``frame``, which calls ``batches``, and report what is found."""
        if self._found is None:
            self._found = kept_rank(frame, self._session)
            if self._session.rank == 0 and (counted := counted_loop(frame)):
                log.warning(counted)
        self.report()

    def report(self) -> None:
        """On the worker that holds rank 0, or the next one that takes it: all run one script."""
        if self._found and self._session.rank == 0 and not self._session.shadowing:
            found, self._found = self._found, ""
            log.warning(found)
            self._hooks.warn(rank_kept=found)


class _Script:
    def __init__(self, frame: FrameType, session: object, tree: ast.Module) -> None:
        self._frame, self._session, self._tree = frame, session, tree

    def finding(self) -> str:
        trail = next(_trails(self._tree, self._frame.f_lineno), [])
        inner = max((i for i, n in enumerate(trail) if isinstance(n, FUNCTIONS)), default=0)
        loops = [n for n in trail[inner:] if isinstance(n, LOOPS)]
        if not loops:
            return ""
        scope, start = trail[inner], loops[0].lineno
        owner = next((n for n in trail if isinstance(n, ast.ClassDef)), None)
        methods: list[ast.stmt] = []
        if owner is not None:
            methods += (n for n in owner.body if isinstance(n, FUNCTIONS))
        shared: KnownVariables = {}
        self._learn(self._tree, shared, start if scope is self._tree else None)
        for method in methods:
            own: KnownVariables = {}
            self._learn(method, own, None)
            shared.update({name: kept for name, kept in own.items() if "." in name})
        known = dict(shared)
        for each in (n for n in trail if isinstance(n, FUNCTIONS)):
            _hide_bound(each, known)
            self._learn(each, known, start)
        region = [n for n in _statements(scope) if n.lineno >= start]
        helpers = self._helpers(region, methods)
        renewed = {name for node in region for name in _stored(node)}
        for name in renewed.union(*map(_stored_outside, helpers)):
            known.pop(name, None)
            shared.pop(name, None)
        uses = list(_uses(region, known))
        for helper in helpers:
            visible = dict(shared)
            _hide_bound(helper, visible)
            uses += _uses([helper], visible)
        return self._in_words(min(uses)) if uses else ""

    def _in_words(self, use: tuple[int, str, int]) -> str:
        line, name, since = use
        return (
            f"{self._frame.f_code.co_filename}:{line} decides by {name!r}, which line {since} has "
            "set from the rank before the loop, but a worker's rank changes: after a move no "
            "worker logs and saves, or a wrong one does. Ask session.rank each time"
        )

    def _learn(self, scope: ast.AST, known: KnownVariables, before: int | None) -> None:
        """Add the variables that ``scope`` sets from the rank, before a line."""
        for node in _statements(scope):
            if before is not None and node.lineno >= before:
                continue
            for target, value in _assignments(node):
                kind = self._kind(value, known)
                if kind is None:
                    known.pop(target, None)
                else:
                    known[target] = KeptVariable(kind, node.lineno)

    def _kind(self, value: ast.expr, known: Mapping[str, KeptVariable]) -> VariableKind | None:
        if self._asks(value):
            return VariableKind.RANK
        match value:
            case ast.Name() | ast.Attribute():
                kept = known.get(ast.unparse(value))
                return None if kept is None else kept.kind
            case ast.Call(func=ast.Name("int"), args=[inner]):
                return self._kind(inner, known)
            case ast.BinOp():
                found = (self._kind(value.left, known), self._kind(value.right, known))
                return VariableKind.RANK if VariableKind.RANK in found else None
            case ast.Compare():
                operands = (value.left, *value.comparators)
                ranked = any(self._kind(each, known) is VariableKind.RANK for each in operands)
                return VariableKind.ANSWER if ranked else None
            case ast.UnaryOp(op=ast.Not()):
                return VariableKind.ANSWER if self._kind(value.operand, known) else None
            case ast.BoolOp():
                answers = (self._kind(each, known) is VariableKind.ANSWER for each in value.values)
                return VariableKind.ANSWER if any(answers) else None
            case ast.IfExp(orelse=ast.Constant(None)) | ast.IfExp(body=ast.Constant(None)):
                # A writer of logs that only one rank has.
                return self._kind(value.test, known)
        return None

    def _asks(self, value: ast.expr) -> bool:
        """Whether it asks for the rank."""
        match value:
            case ast.Attribute(attr="rank"):
                return self._is_session(ast.unparse(value.value))
            case ast.Call(func=ast.Name("get_rank") | ast.Attribute(attr="get_rank")):
                return ast.unparse(value.func) in GET_RANK
            case ast.Call(args=[ast.Constant("RANK"), *_]):
                return ast.unparse(value.func) in ENVIRONMENT
            case ast.Subscript(slice=ast.Constant("RANK")):
                return ast.unparse(value.value) in ("environ", "os.environ")
        return False

    def _is_session(self, path: str) -> bool:
        name, *attributes = path.split(".")
        scopes = {**self._frame.f_globals, **self._frame.f_locals}
        if name not in scopes:
            return path.endswith("session")
        value = scopes[name]
        for attribute in attributes:
            value = getattr(value, "__dict__", {}).get(attribute)
        return value is self._session

    def _helpers(self, region: list[ast.stmt], methods: list[ast.stmt]) -> list[ast.stmt]:
        """Functions of the file that the region calls, and those that they call."""
        found = {f.name: f for f in self._tree.body if isinstance(f, FUNCTIONS)}
        found |= {f"self.{f.name}": f for f in methods if isinstance(f, FUNCTIONS)}
        helpers: dict[str, ast.stmt] = {}
        todo: list[ast.stmt] = list(region)
        while todo:
            for node in ast.walk(todo.pop()):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if name in found and name not in helpers:
                    helpers[name] = found[name]
                    todo.append(found[name])
        return list(helpers.values())


def _tree(frame: FrameType) -> ast.Module:
    """The file of ``frame``."""
    return ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


def _trails(node: ast.AST, line: int) -> Iterator[list[ast.AST]]:
    """Paths from ``node`` to loops over what is called in ``line``."""
    if isinstance(node, ast.For) and node.iter.lineno <= line <= (node.iter.end_lineno or 0):
        yield [node]
    for child in ast.iter_child_nodes(node):
        for trail in _trails(child, line):
            yield [node, *trail]


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Statements of ``scope`` in their order, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _statements(child)


def _assignments(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement sets, with their values."""
    match node:
        case ast.Assign():
            for target in node.targets:
                yield from _pairs(target, node.value)
        case ast.AnnAssign(value=ast.expr() as value):
            yield from _pairs(node.target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Tuple(), ast.Tuple() if len(target.elts) == len(value.elts):
            for inner, its_value in zip(target.elts, value.elts, strict=True):
                yield from _pairs(inner, its_value)
        case ((ast.Name() | ast.Attribute()), _):
            yield ast.unparse(target), value


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that are set in ``node``."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield ast.unparse(each)


def _stored_outside(function: ast.AST) -> Iterator[str]:
    """Names beyond ``function`` that it sets."""
    declared = (n for n in ast.walk(function) if isinstance(n, ast.Global | ast.Nonlocal))
    outer = {name for node in declared for name in node.names}
    return (name for name in _stored(function) if "." in name or name in outer)


def _hide_bound(function: ast.AST, known: KnownVariables) -> None:
    """Forget names that ``function`` binds itself."""
    bound = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    for node in _statements(function):
        bound |= {name for name in _stored(node) if "." not in name}
    for name in bound:
        known.pop(name, None)


def _uses(nodes: list[ast.stmt], known: KnownVariables) -> Iterator[tuple[int, str, int]]:
    """Line, name and line of origin, wherever ``nodes`` decide by a variable of ``known``."""
    for node in (each for statement in nodes for each in ast.walk(statement)):
        for value in _deciding(node):
            name = ast.unparse(value)
            if name in known:
                yield value.lineno, name, known[name].line
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            kept = known.get(ast.unparse(node))
            if kept is not None and kept.kind is VariableKind.ANSWER:
                yield node.lineno, ast.unparse(node), kept.line


def _deciding(node: ast.AST) -> Iterator[ast.expr]:
    """Variables that are compared, or whose truth counts. A rank may have other uses."""
    found: list[ast.expr] = []
    match node:
        case ast.Compare():
            found = [node.left, *node.comparators]
        case ast.UnaryOp(op=ast.Not()):
            found = [node.operand]
        case ast.If() | ast.IfExp() | ast.While():
            found = [node.test]
        case ast.BoolOp():
            found = node.values
    for each in found:
        sides = [each.left, each.right] if isinstance(each, ast.BinOp) else [each]
        yield from (side for side in sides if isinstance(side, ast.Name | ast.Attribute))
