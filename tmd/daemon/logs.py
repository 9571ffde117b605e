"""Log output of the daemon: one line per change of reason, for people or as JSON for journald."""

from __future__ import annotations

import logging
import sys

import structlog

from tmd.config import Log


def configure(config: Log, **bound: str) -> None:
    """Set up structlog for this process, or anew; ``bound`` stands in every line."""
    if config.format == "json":
        render: list[structlog.typing.Processor] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        colors = sys.stderr.isatty()
        formatter = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=formatter)]
    structlog.configure(
        processors=[
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
