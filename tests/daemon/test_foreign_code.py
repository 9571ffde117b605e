"""What plug-in code may raise without an end of the daemon, and what is not its own."""

from __future__ import annotations

import asyncio
import signal
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
