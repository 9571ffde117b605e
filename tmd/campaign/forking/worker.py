"""A worker as a fork of its launcher."""

from __future__ import annotations

import atexit
import logging
import os
import random
import runpy
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import structlog

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DESCRIPTORS = range(3, 4096)


def run_script(command: Sequence[str]) -> None:
    """Equivalent to ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS``; ``command``
    begins with the interpreter."""
    if command[1] == "-m":
        sys.argv = list(command[2:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command[1:])
    sys.path.insert(0, str(Path(command[1]).resolve().parent))
    runpy.run_path(command[1], run_name="__main__")


class ForkedWorker:
    """The part of ``subprocess.Popen`` that :mod:`tmd.starting` and the launcher use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes] | None,
        stderr: int | None,
        process_group: int,
        preexec_fn: Callable[[], None],
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            preexec_fn()
            _leave_launcher(stdout, env)
            os._exit(ended(lambda: run_script(command)))

    def send_signal(self, number: signal.Signals) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """The exit status, or the negative of the signal that ended the process."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _leave_launcher(output: IO[bytes] | None, env: Mapping[str, str]) -> None:
    """Release all resources of the launcher. Its stack frames remain below this one."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    structlog.reset_defaults()
    # They would remove the launcher's own folders when this worker ends.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    logging.getLogger().handlers.clear()
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.closerange(DESCRIPTORS.start, DESCRIPTORS.stop)
    os.environ.clear()
    os.environ.update(env)
    random.seed()


def ended(run: Callable[[], Any]) -> int:
    """Run ``run`` and what is registered for the end of the process. Returns the exit status that
    the interpreter would set."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does after a fork
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
