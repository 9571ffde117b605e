"""A joiner that computes other bits than its rank notices it, reports it, and gets no rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.trainer.scripts import Averaged, Scheduled, Script, normed
from tests.trainer.tailing import Pair, pair
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.trainer.shadow.receiver import CopyInstead, Differs, ShadowLost
from tmd.trainer.shadow.source import ShadowSource
from tmd.trainer.state.units import UNITS, whole_digest

pytestmark = pytest.mark.timeout(60)


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the first number."""
    tensor.detach().view(-1).view(torch.int32)[:1] ^= 1


def flip_parameter(script: Script) -> None:
    flip(next(script.model.parameters()))


def flip_moment(script: Script) -> None:
    state = script.optimizers[0].state
    flip(state[next(script.model.parameters())]["exp_avg"])


def flip_buffer(script: Script) -> None:
    flip(script.model.get_buffer("1.running_mean"))


def once(pair: Pair, act: Callable[[Script], None]) -> int:
    """Let the joiner act after its next step; returns the step at whose start that is."""
    at = pair.source.step + 1

    def meanwhile(step: int) -> None:
        if step == at:
            act(pair.joiner.script)

    pair.joiner.meanwhile = meanwhile
    return at


@pytest.mark.parametrize(
    ("act", "part"),
    [
        (flip_parameter, UNITS),
        (flip_moment, UNITS),
        (flip_buffer, "buffers"),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_boundary(
    act: Callable[[Script], None], part: str
) -> None:
    """The state was equal before, so only its own hardware or libraries can be the cause."""
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.together(2)
        at = once(p, act)
        error = p.come_apart()

        assert isinstance(error, Differs)
        assert f"rank 0: {part} at the start of step {at}" in str(error)
        assert ("(first of all 0.weight)" in str(error)) == (part == UNITS)
        assert p.joiner.following.status().verified is None


def test_a_registered_object_that_differs_is_not_blamed_on_the_hardware() -> None:
    """A script may change its scheduler in any way, which then rules out a shadow."""

    def act(script: Script) -> None:
        assert isinstance(script, Scheduled)
        script.scheduler.last_epoch += 1

    with pair(Scheduled) as p:
        p.meet()
        p.together(2)
        once(p, act)
        error = p.come_apart()

        assert isinstance(error, LinkError)
        assert "registered objects differ" in str(error)


def test_another_collective_is_named() -> None:
    """A joiner whose script takes another branch is refused, not treated as lost."""
    with pair(Script) as p:
        p.meet()
        p.together(2)
        assert p.source.mirror is not None
        p.source.mirror.output("0", "allreduce", [torch.ones(3)])
        mine = torch.zeros(4)
        with pytest.raises(LinkError):
            p.joiner.shadow.outputs("allreduce", "0", [mine], [mine])
        p.source.begin()
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, StateMismatch)
        assert "allreduce float32[4] here, allreduce float32[3] there" in str(p.joiner.error)


def test_the_sources_reason_reaches_the_joiner() -> None:
    """For any end, the joiner's status can state the reason."""
    with pair(Script) as p:
        p.meet()
        p.together(1)
        assert p.source.mirror is not None
        p.source.mirror.drop("the step broke")
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, ShadowLost)
        assert (str(p.joiner.error), p.joiner.error.final) == ("the step broke", False)


def test_a_shadow_without_its_source_keeps_a_verified_state() -> None:
    """A standby may serve in a recovery with a state that is verified after every own step."""
    with pair(Script) as p:
        p.meet()
        assert not p.joiner.following.has_state
        p.together(3)
        assert p.source.mirror is not None
        p.source.mirror.drop("gone")
        p.joiner.until(lambda: p.joiner.error is not None)

        assert p.joiner.following.has_state
        assert p.joiner.following.step == p.source.step
        p.assert_equal()


def test_a_digest_that_waits_refutes_the_state_of_a_lost_rank() -> None:
    """The rank is killed in the step after a bit has flipped here. It would have been found at the
    next boundary; where this is the only copy, nothing else would find it."""
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.together(3)
        joiner, source = p.joiner, p.source
        assert source.mirror is not None
        known = joiner.following.refutation()
        joiner.may_go_on.clear()
        source.begin()
        at = source.step + 1
        joiner.until(lambda: joiner.at == at)
        flip_moment(joiner.script)
        source.commit()
        source.begin()
        joiner.until(lambda: at in [step for step, _ in joiner.shadow.checks()])
        had = joiner.following.has_state
        own = whole_digest(joiner.units, at)
        joiner.following._digests.ours(at, own)
        why = joiner.following.refutation()
        has = joiner.following.has_state
        source.mirror.drop("gone")
        joiner.may_go_on.set()
        joiner.until(lambda: joiner.error is not None)

        assert known is None
        assert f"start of step {at}" in str(why)
        assert isinstance(why, Differs)
        assert joiner.following.refutation() is why
        assert (had, has) == (True, False)


@contextmanager
def jumped() -> Iterator[tuple[Pair, ShadowSource]]:
    """A joiner that a wrong tail has led over a step, and the mirror of its rank. No digest was
    compared since."""
    with pair(lambda seed: Averaged(seed, every=50), trained=2) as p:
        p.meet()
        source, joiner = p.source, p.joiner
        p.together(48 - source.step)
        p.fall_behind(3, shut=True)
        joiner.until(lambda: joiner.at == source.step + 1)
        assert source.mirror is not None
        yield p, source.mirror


def test_an_unverified_jump_leaves_no_state() -> None:
    """The tail may be wrong: no digest was compared."""
    with jumped() as (p, mirror):
        source, joiner = p.source, p.joiner
        mirror.drop("gone")
        joiner.until(lambda: joiner.error is not None)

        assert joiner.following.step == source.step + 1
        assert not joiner.following.has_state


def test_a_wrong_tail_is_not_blamed_on_the_hardware() -> None:
    """It led over a step after which the script had changed weights. What this worker then computes
    proves nothing about its machine: it gets the state, or another rehearsal."""
    with jumped() as (p, mirror):
        source, joiner = p.source, p.joiner
        mirror.output("0", "allreduce", [torch.ones(3)])
        mine = torch.zeros(4)
        with pytest.raises(LinkError):
            joiner.shadow.outputs("allreduce", "0", [mine], [mine])
        source.begin()
        joiner.until(lambda: joiner.error is not None)

        assert isinstance(joiner.error, CopyInstead)
        assert "the tail was wrong" in str(joiner.error)
