"""What plug-in code may raise without an end of the daemon, and what is not its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from tmd.daemon.foreign_code import PluginExit, contained_exit


@pytest.fixture
def on_sigint():
    """Sets the handler of SIGINT, for the test only."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "error", [SystemExit(0), GeneratorExit(), asyncio.CancelledError(), BaseException("odd")]
)
def test_what_is_no_exception_becomes_one(error):
    with pytest.raises(PluginExit) as found, contained_exit():
        raise error

    assert repr(error) in str(found.value)
    assert found.value.__cause__ is error


def test_errors_and_what_may_pass_stay_as_they_are():
    for error in (ValueError("x"), StopIteration(), asyncio.CancelledError()):
        with pytest.raises(type(error)) as found, contained_exit(asyncio.CancelledError):
            raise error

        assert found.value is error


def test_ctrl_c_is_not_taken_from_its_user(on_sigint):
    """In a verb, plug-in code may run just as it comes."""
    on_sigint(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), contained_exit():
        signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_no_signal_can_have_raised_is_the_plug_ins_own(on_sigint):
    """Where something handles SIGINT, as the loop of the daemon does, or in a thread."""
    found = []

    def call():
        try:
            with contained_exit():
                raise KeyboardInterrupt
        except PluginExit as error:
            found.append(error)

    on_sigint(lambda *_: None)
    call()
    on_sigint(signal.default_int_handler)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    assert len(found) == 2


STOPPED = """
import os, signal
from tmd.daemon import foreign_code
foreign_code.BLOCKS_S = 0.0
with foreign_code.stops_noticed():
    with foreign_code.timed_code(lambda _: print("long", flush=True)):
        pass
    with foreign_code.timed_code(lambda _: print("stopped", flush=True)):
        os.kill(os.getpid(), signal.SIGSTOP)
    with foreign_code.timed_code(lambda _: print("long again", flush=True)):
        pass
print(signal.getsignal(signal.SIGCONT) == signal.SIG_DFL)
"""


def test_a_stop_of_the_process_counts_for_no_code():
    """Else the daemon of a host that was frozen accuses a detector."""
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=30)

    assert os.WIFSTOPPED(status)
    assert out.split("\n") == ["long", "long again", "True", ""]
