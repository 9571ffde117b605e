"""Starts one worker: its log file, its process and the pidfd that reports its end."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tmd.core.values.errors import TmdError
from tmd.core.values.reasons import in_words
from tmd.lifeline import die_with_parent

spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""Creates the process. The campaign's fork server replaces it by a fork, which does not import
torch again."""


class CannotStart(TmdError):
    """The operating system refuses the command of a worker."""


def start(
    command: Sequence[str], environment: Mapping[str, str], log_file: Path | None
) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its pidfd; its output goes to ``log_file``, or to that of the launcher.

    Raises:
        CannotStart: the operating system refuses the command or the log file.
    """
    try:
        with ExitStack() as open_file:
            output = None
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                output = open_file.enter_context(log_file.open("ab"))
            child = spawn(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                process_group=0,
                preexec_fn=die_with_parent,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise _refused(command, error) from error
    try:
        return child, os.pidfd_open(child.pid)
    except OSError as error:
        # Its end would go unnoticed.
        child.kill()
        child.wait()
        raise _refused(command, error) from error


def _refused(command: Sequence[str], error: Exception) -> CannotStart:
    return CannotStart(f"cannot start {shlex.join(command)}: {in_words(error)}")
