"""``tmd-daemon``, which ``tmd daemon`` executes: the daemon without the command line.

The code that parses the verbs and options of ``tmd`` takes as much memory as the daemon itself
and would stay loaded for as long as the host runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from tmd.config import Settings, find_file, load, refuse_exposed
from tmd.core.values.errors import ConfigError, PluginError, TmdError
from tmd.core.values.printable import printable_lines
from tmd.daemon import logs
from tmd.daemon.service import serve

FAILED, USAGE, INTERRUPTED = 1, 2, 130
END_S = 1.0
"""Longest wait for the tasks that are left when the daemon has ended."""


def main() -> None:
    """Run the daemon of this host until SIGTERM or SIGINT; an error is printed as one sentence."""
    parser = argparse.ArgumentParser("tmd-daemon", description=main.__doc__)
    parser.add_argument("-c", "--config", type=Path, help="default: $TMD_CONFIG, /etc/tmd/tmd.toml")
    file: Path | None = parser.parse_args().config
    # Files written here, such as findings and the alert journal, are readable by this user only.
    os.umask(0o077)
    try:
        settings = _read(file)
        logs.configure(settings.log, host=settings.host.name)
        _run(serve(settings, lambda: _read(file), find_file(file)))
    except TmdError as error:
        print(printable_lines(f"tmd: {error}"), file=sys.stderr)
        wrong = isinstance(error, ConfigError | PluginError)
        raise SystemExit(USAGE if wrong else FAILED) from None
    except (Exception, SystemExit):
        # Log the failure in the log's own format and size limits instead of Python's. SystemExit:
        # a task of a plug-in's own called sys.exit(), perhaps with 0, after which systemd would not
        # start the daemon again.
        structlog.get_logger("tmd.daemon").exception("the daemon failed")
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _run(work: Coroutine[Any, Any, None]) -> None:
    """:func:`asyncio.run`, but without waiting for a detector that ignores that it is cancelled."""
    runner = asyncio.Runner()
    try:
        runner.run(work)
    finally:
        left = asyncio.all_tasks(runner.get_loop())
        for task in left:
            task.cancel()
        if left:
            runner.get_loop().run_until_complete(asyncio.wait(left, timeout=END_S))
        if all(task.done() for task in left):
            runner.close()


def _read(file: Path | None) -> Settings:
    settings = load(file)
    refuse_exposed(find_file(file))
    return settings


if __name__ == "__main__":
    main()
