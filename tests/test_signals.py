"""The signals that ask a process to end."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tmd.signals import as_ctrl_c

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def restored():
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING, ids=lambda each: each.name)
@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background"])
def test_each_acts_as_ctrl_c(number: signal.Signals, ignored: bool) -> None:
    """A shell starts a command in the background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    before = {each: signal.getsignal(each) for each in ENDING}
    with pytest.raises(KeyboardInterrupt), as_ctrl_c():
        signal.raise_signal(number)

    assert {each: signal.getsignal(each) for each in ENDING} == before


def test_what_an_event_loop_has_begun_is_ended() -> None:
    ended = []

    async def work() -> None:
        try:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt), as_ctrl_c():
        asyncio.run(work())

    assert ended == [True]


def test_a_signal_that_is_ignored_under_nohup_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with as_ctrl_c():
        signal.raise_signal(signal.SIGHUP)

        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
