"""Errors without a text get one, and no code formats an error directly."""

from __future__ import annotations

import ast
import asyncio
import errno
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from tmd_detectors.exec import detector as exec_detector
from tmd_detectors.xid import table

from tmd.campaign.reading import load as load_story
from tmd.cli import doctor, policies
from tmd.config import load
from tmd.core.values import errors
from tmd.core.values.decode_errors import brief
from tmd.core.values.errors import ConfigError, TmdError
from tmd.core.values.model import Member
from tmd.core.values.reasons import in_words, os_reason, place_remedy
from tmd.daemon import plugins
from tmd.fabric.dial import Caller
from tmd.fabric.handshake import LinkPurpose
from tmd.plugin import Detector, DetectorContext, Signal
from tmd.sections import read_secret

ROOT = Path(__file__).parents[2]
FOLDERS = ("tmd", "detectors", "policies")
ELSEWHERE = {
    "tmd/core/values/reasons.py": "says it",
    "tmd/core/values/errors.py": "says it",
    "tmd/schema.py": "takes the text of a validation apart",
    "tmd/daemon/redis_errors.py": "looks for words in the text",
    "detectors/xid/listener.py": "runs without tmd; its own error always has a text",
    "detectors/exec/warden.py": "runs without tmd, and falls back to the name of the type",
    "tmd/daemon/web/server.py": "answers with an error of the store, or of the system",
}
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
"""Errors of tmd: :class:`TmdError` sees to it that they have words."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out"),
        (asyncio.CancelledError(), "cancelled"),
        (OSError(), "the operating system gives no reason"),
        (ConnectionAbortedError(), "connection aborted error"),
        (KeyError(), "key error"),
        (KeyError(""), "key error"),
        (KeyError("port"), "there is no 'port'"),
        (AssertionError(), "an assertion does not hold"),
        (EOFError(), "the data ends too early"),
        (RuntimeError(" "), "runtime error"),
        (ValueError("too long"), "too long"),
        (OSError(2, "No such file"), "[Errno 2] No such file"),
        (msgspec.ValidationError(), "validation error"),
        (TmdError(), "tmd error"),
        (ConfigError(), "config error"),
        (ConfigError("no key"), "no key"),
    ],
)
def test_every_error_has_a_text(error: BaseException, words: str) -> None:
    assert in_words(error) == words
    assert brief(error) == words


@pytest.mark.parametrize("name", sorted(OURS - {"StaleLease"}))
def test_tmd_errors_have_a_text_wherever_they_are_formatted(name: str) -> None:
    assert str(getattr(errors, name)())


def test_the_reason_of_the_system_needs_no_number_and_no_file() -> None:
    assert os_reason(OSError(13, "Permission denied", "/x")) == "Permission denied"
    assert os_reason(OSError()) == "the operating system gives no reason"
    assert os_reason(TimeoutError()) == "timed out"


def formatted(tree: ast.Module) -> Iterator[ast.expr]:
    """Each place where a caught exception, or one that a function is given, becomes text."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ExceptHandler) and scope.name and scope.type:
            kinds = [n for n in ast.walk(scope.type) if isinstance(n, ast.Name)]
            if not {n.id for n in kinds} <= OURS:
                yield from _texts_of(scope.name, scope)
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in scope.args.args:
                kind = ast.unparse(argument.annotation) if argument.annotation else ""
                if kind.endswith(("Exception", "Error")) and kind not in OURS:
                    yield from _texts_of(argument.arg, scope)


def _texts_of(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(scope):
        match node:
            case ast.FormattedValue(conversion=-1, value=value) if _is(name, value):
                yield node
            case ast.Call(func=ast.Name(id="str"), args=[first, *_]) if _is(name, first):
                yield node


def _is(name: str, node: ast.AST) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(_is(name, value) for value in node.values)
    if isinstance(node, ast.Attribute) and node.attr == "strerror":
        node = node.value
    return isinstance(node, ast.Name) and node.id == name


@pytest.mark.parametrize(
    "code",
    [
        'try: a()\nexcept OSError as e: say(f"no: {e}")',
        'try: a()\nexcept OSError as e: say(f"no: {e.strerror}")',
        "try: a()\nexcept (WireError, OSError) as e: say(str(e))",
        'try: a()\nexcept OSError as e: say(f"no: {e or 1}")',
        "def tell(error: BaseException): say(str(error))",
    ],
)
def test_a_plain_format_is_found(code: str) -> None:
    """Shows that the next test can fail."""
    assert list(formatted(ast.parse(code)))


def test_no_code_formats_an_error_that_may_be_empty() -> None:
    """Each goes through a function that always has words."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in ELSEWHERE
        for node in formatted(ast.parse(file.read_text()))
    ]

    assert found == []


class Broken(Detector):
    """A plug-in that cannot be created."""

    name = "broken"
    error: ClassVar[BaseException]

    def __init__(self) -> None:
        raise self.error

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        return
        yield


def _created() -> None:
    point = EntryPoint("broken", f"{__name__}:Broken", "tmd.detectors")
    plugins._instance(point, Detector, plugins.describe(point))


def _looked() -> None:
    raise TmdError(doctor._ports("127.0.0.1").text)


def _executed() -> None:
    check = exec_detector.ExecCheck(name="c", command=("true",))
    raise TmdError(asyncio.run(exec_detector.CheckRunner(check, 100).run()).message)


def _dialled() -> None:
    member = Member("h/j/0.1", "h", "127.0.0.1:1")
    Caller("h/j/0.2", b"key").dial(member, "", LinkPurpose.RAW, 1, timeout=1.0)


EMPTY = (OSError(), TimeoutError(), PermissionError(), ConnectionAbortedError())
PLACES: dict[str, Callable[[Path], object]] = {
    "configuration": lambda file: load(file),
    "scenario": lambda file: load_story(file, {}),
    "secret": lambda file: read_secret(file, "[cluster] secret_file"),
    "view": lambda file: policies._read(file),
    "xid table": lambda file: table.load(str(file)),
    "plug-in": lambda _: _created(),
    "ports": lambda _: _looked(),
    "check": lambda _: _executed(),
    "link": lambda _: _dialled(),
}


@pytest.mark.parametrize("error", EMPTY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_without_a_text_is_described(
    error: OSError, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system, or a plug-in, raises an error without a text."""

    def fail(*_: object, **__: object) -> str:
        raise error

    file = tmp_path / "file.toml"
    file.write_text("")
    file.chmod(0o600)
    for name in ("read_text", "read_bytes", "open"):
        monkeypatch.setattr(Path, name, fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(Broken, "error", error, raising=False)
    with pytest.raises(TmdError) as raised:
        PLACES[place](file)

    assert f": {in_words(error)}" in str(raised.value)
    assert not str(raised.value).endswith((":", ": None"))


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "run this as a user who may write there"),
        (errno.EROFS, "name another folder"),
        (errno.ENOSPC, "make room there"),
        (errno.ENOTDIR, "name another folder"),
    ],
)
def test_only_a_lack_of_rights_is_mended_by_another_user(code: int, remedy: str) -> None:
    """Not a file where a folder must be, or a full disk."""
    assert place_remedy(OSError(code, "")).startswith(remedy)
