"""The end of a shadow: after a take-over, or for a reason that the joiner receives."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD

from tests.fabric.circle import at_once
from tests.trainer.scripts import Script
from tests.trainer.showing import show
from tmd.core.values.errors import LinkError
from tmd.trainer.protocol.frames import (
    Begin,
    Boundary,
    Dropped,
    Frame,
    Output,
    ShadowRequest,
    Took,
    Unit,
)
from tmd.trainer.state.data import Position
from tmd.trainer.state.layout import Leaf

pytestmark = pytest.mark.timeout(60)


def test_a_joiner_that_assumed_the_rank_releases_the_source() -> None:
    with show() as s:
        s.arrive()
        taken = at_once(
            [lambda: s.shown.wait_until_taken(lambda: False), lambda: s.ear.say(Took(3))]
        )
        s.ear.end()

        assert taken[0]
        assert s.shown.over
        assert s.ear.of(Dropped) == [Dropped("the rank was taken over")]


def test_a_joiner_that_leaves_after_its_message_has_assumed_the_rank() -> None:
    """Its frame came before the end of the link, even if the source reads it only then."""
    with show() as s:
        s.arrive()
        s.ear.say(Took(3))
        s.ear.link.sock.shutdown(socket.SHUT_WR)
        s.ear.end()

        assert s.shown.over
        assert s.shown.wait_until_taken(lambda: False)


def test_a_dead_joiner_has_not_assumed_the_rank() -> None:
    with show() as s:
        s.arrive()
        gone = at_once([lambda: s.shown.wait_until_taken(lambda: False), s.ear.link.close])

        assert not gone[0]


def test_the_wait_for_a_joiner_can_be_called_off() -> None:
    """The leader drops the plan; the rank is taken back, and the joiner is notified."""
    with show() as s:
        s.arrive()
        asked: list[int] = []

        def cancelled() -> bool:
            asked.append(1)
            return len(asked) > 3

        assert not s.shown.wait_until_taken(cancelled)
        s.ear.end()
        assert s.ear.of(Dropped) == [Dropped("the rank was not taken over")]


def test_the_first_reason_is_reported() -> None:
    with show() as s:
        s.shown.drop("the step broke")
        s.shown.drop("later", final=True)
        s.train(2)
        s.ear.end()

        assert s.ear.of(Dropped) == [Dropped("the step broke")]
        assert isinstance(s.ear.error, LinkError)


@pytest.mark.parametrize(
    "said", [ShadowRequest("p", 1), Unit(0, 0, Leaf(1)), Boundary(1, Position()), Output("0", "x")]
)
def test_a_joiner_that_sends_an_unexpected_frame_is_dropped(said: Frame) -> None:
    with show() as s:
        s.ear.say(said)
        s.ear.end()

        assert s.shown.over
        assert s.ear.of(Dropped)[0].reason == f"unexpected {type(said).__name__} from the joiner"


def test_garbage_from_the_joiner_drops_it() -> None:
    with show() as s:
        s.ear.link.send_frame(b"\xc1")
        s.ear.end()

        assert s.shown.over
        assert "does not speak this protocol" in s.ear.of(Dropped)[0].reason
        s.train(2)


def test_a_dropped_joiner_stays_dropped() -> None:
    """Later steps change nothing."""
    with show() as s:
        s.ear.say(Begin())
        s.ear.link.close()
        s.ear.within(30.0, lambda: s.shown.over)
        assert s.shown.over
        s.train(2)
        assert s.shown.over


# --- what cannot be shown -------------------------------------------------------------------------


class Odd:
    """Has a state that cannot be copied."""

    def state_dict(self) -> dict[str, object]:
        return {"act": print}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


def odd_value(script: Script) -> None:
    script.optimizers[0].param_groups[0]["act"] = print


def odd_state(script: Script) -> None:
    script.optimizers[0].state[next(script.model.parameters())]["seen"] = {1, 2}


def odd_other(script: Script) -> None:
    script.others["odd"] = Odd()


@pytest.mark.parametrize("act", [odd_value, odd_state, odd_other])
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_that_cannot_move_is_the_joiners_trouble(
    act: Callable[[Script], None], whole: bool
) -> None:
    """Training continues, and the joiner receives the reason."""
    script = Script(1, lambda model: [SGD(model.parameters(), lr=0.01)])
    act(script)
    with show(script) as s:
        s.ear.say(Begin(whole=whole))
        s.until_over(lambda: s.pause(lambda: s.shown.over))
        s.train(2)
        s.ear.end()

        assert "only tensors, containers and plain values can move" in s.ear.of(Dropped)[0].reason


def test_an_output_that_cannot_be_copied_is_the_joiners_trouble() -> None:
    """A group's thread would take the error for its own and poison the step of all ranks."""
    with show() as s:
        s.arrive()
        s.shown.output("0", "allreduce", [torch.empty(3, device="meta")])
        s.ear.end()

        assert s.shown.over
        assert len(s.ear.of(Dropped)) == 1
