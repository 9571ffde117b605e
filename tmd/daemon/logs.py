"""Log output of the daemon: one line per change of reason, for people or as JSON for journald."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tmd.config import Log
from tmd.core.rationing import Allowance

BURST, PER_SECOND = 200, 10.0
"""Lines about one kind of event."""
KINDS = 500
"""Of events that are told apart; all others share one allowance."""


class Rationing:
    """A processor that leaves out what is said too often, and says how much that was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, Allowance] = {}
        self._left_out: Counter[str] = Counter()

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        kind = str(line.get("event"))
        if kind not in self._known and len(self._known) >= KINDS:
            kind = ""
        before = self._known.get(kind, Allowance(BURST, PER_SECOND))
        after = before.spent(self._clock())
        if after.owed_s > 0:
            self._left_out[kind] += 1
            raise structlog.DropEvent
        self._known[kind] = after
        if missing := self._left_out.pop(kind, 0):
            line["left_out"] = missing
        return line


def configure(config: Log, **bound: str) -> None:
    """Set up structlog for this process, or anew; ``bound`` stands in every line."""
    if config.format == "json":
        render: list[Processor] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        colors = sys.stderr.isatty()
        formatter = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=formatter)]
    structlog.configure(
        processors=[
            Rationing(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        # A reload may change the level: loggers that were used before must hear of it.
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)
