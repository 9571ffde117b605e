"""Log output of the daemon: one line per change, for people or as JSON for journald."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from tmd.config import Log
from tmd.core.alerts.quota import Allowance
from tmd.core.values.printable import printable, printable_lines

FRAMES, CAUSES, WORDS = 20, 5, 2000
"""Limits for a logged failure: frames per exception, exceptions, characters per text."""
DEPTH = 8
"""Levels of a logged failure: enough for the frames of an exception in a group."""
BRIEF = 300
"""Characters of text that came from a client."""
BURST, PER_SECOND = 200, 10.0
"""Lines of one kind: at once, and per second afterwards. A kind is an event, its level and its
code, if it has one."""
KINDS = 500
"""Kinds that have an allowance of their own. While all are in use, further ones share one."""


_without_locals = ExceptionDictTransformer(show_locals=False, max_frames=FRAMES)
"""Local variables are omitted: they contain configurations and thus secrets."""


class RateLimit:
    """A processor that drops lines repeated too often and reports how many it dropped. It may be
    called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, Allowance] = {}
        self._left_out: Counter[str] = Counter()
        self._changing = threading.RLock()  # a finalizer may log while the lock is held

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        with self._changing:
            return self._counted(method, line)

    def _counted(self, method: str, line: EventDict) -> EventDict:
        now = self._clock()
        kind = self._kind(f"{method} {line.get('event')} {line.get('code', '')}", now)
        after = self._known.get(kind, Allowance(BURST, PER_SECOND)).spent(now)
        if after.owed_s > 0:
            self._left_out[kind] += 1
            raise structlog.DropEvent
        self._known[kind] = after
        if missing := self._left_out.pop(kind, 0):
            line["left_out"] = missing
        return line

    def _kind(self, kind: str, now: float) -> str:
        if kind in self._known or len(self._known) < KINDS:
            return kind
        self._known = {k: a for k, a in [*self._known.items()] if not a.is_whole(now)}
        return kind if len(self._known) < KINDS else ""


def _visible(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """A processor: text from hosts, kernels and scripts cannot control a terminal."""
    return {key: printable(v) if isinstance(v, str) else v for key, v in line.items()}


def _bounded(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """A processor of the JSON format: cuts long texts, lists and nested values."""
    return {key: _cut(value, depth=DEPTH) for key, value in line.items()}


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= WORDS else f"{value[:WORDS]}..."
    if depth == 0 and isinstance(value, dict | list | tuple):
        return "..."
    if isinstance(value, dict):
        return {key: _cut(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        most = CAUSES if value and isinstance(value[0], dict) and "frames" in value[0] else FRAMES
        left = [f"... {len(value) - most} more"] if len(value) > most else []
        return [_cut(item, depth - 1) for item in value[:most]] + left
    return value


def _traceback(out: TextIO, failure: ExcInfo) -> None:
    """The traceback of ``failure`` for people; exception texts are escaped, too."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, failure)
    out.write(printable_lines(text.getvalue()))


class _Output:
    """Writes lines to a stream that may fail: a disk is full, or a reader has gone.

    Nobody expects a line of the log to fail, and the daemon must outlive its log.
    """

    def __init__(self) -> None:
        self.stream: TextIO = sys.stderr
        self._unwritten = 0
        self._writing = threading.RLock()  # a finalizer may log within a write

    def write(self, text: str) -> None:
        """Write one line."""
        with self._writing:
            try:
                self.stream.write(f"{text}\n")
                self.stream.flush()
            except (OSError, ValueError, RuntimeError):  # the stream is closed, or within a write
                self._unwritten += 1
            else:
                self._unwritten = 0

    debug = info = warning = error = critical = write

    def reported(self, _: WrappedLogger, __: str, line: EventDict) -> EventDict:
        """A processor: states how many lines failed since the last one that was written."""
        if self._unwritten:
            line["unwritten"] = self._unwritten
        return line


_output = _Output()
"""One per process: a reload keeps its count."""


class _Forwarding(logging.Handler):
    """Turns records of :mod:`logging` into lines like those of tmd."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.args:
            fields["message"] = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__module__.startswith("aiohttp."):
            # A client sent invalid data: where the code detected that is of no interest.
            fields["problem"] = f"{type(error).__name__}: {error}"[:BRIEF]
        elif error is not None:
            fields["exc_info"] = error
        # The template is the kind, so all lines of one template share one allowance.
        structlog.get_logger(record.name).log(record.levelno, str(record.msg), **fields)


def _forward() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, _Forwarding) for handler in root.handlers):
        root.addHandler(_Forwarding())


def configure(config: Log, **bound: str) -> None:
    """Set up structlog for this process, also repeatedly; ``bound`` appears in every line."""
    if config.format == "json":
        render: list[Processor] = [
            structlog.processors.ExceptionRenderer(_without_locals),
            _bounded,
            structlog.processors.JSONRenderer(),
        ]
    else:
        colors = sys.stderr.isatty()
        renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_traceback)
        render = [_visible, renderer]
    _output.stream = sys.stderr
    structlog.configure(
        processors=[
            RateLimit(),
            _output.reported,
            lambda _, __, line: {**bound, **line},  # context variables do not reach new threads
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.level.upper()]
        ),
        logger_factory=lambda *_: _output,
        # A reload may change the level: loggers must not keep a cached one.
        cache_logger_on_first_use=False,
    )
    _forward()
