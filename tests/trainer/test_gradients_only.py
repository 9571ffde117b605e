"""A rank whose outputs exceed the link is followed by its gradients, up to the switch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from torch import Tensor, nn, zeros
from torch.optim import SGD, Optimizer

from tests.trainer.scripts import Averaged, Closed, Optimize, Script, Sparse, normed
from tests.trainer.showing import FAST, UNREAD, show, wide
from tests.trainer.tailing import Pair, pair
from tests.trainer.test_tail import SCRIPTS
from tmd.core.values.limits import ShadowLimits
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    Boundary,
    DigestCheck,
    Dropped,
    GradientsOnly,
    HandOver,
    Output,
    Settled,
)
from tmd.trainer.shadow.output_load import LARGE, LinkRate, OutputLoad
from tmd.trainer.shadow.receiver import CopyInstead
from tmd.trainer.shadow.source import BEHIND, HANDED_OVER
from tmd.trainer.state.data import Position
from tmd.trainer.state.units import Units

pytestmark = pytest.mark.timeout(60)


def chosen() -> OutputLoad:
    """The configuration wants gradients."""
    return OutputLoad(ShadowLimits(mirror="gradients"))


def outputs(size: int) -> list[Tensor]:
    return [zeros(size // 4)]


# --- the choice -----------------------------------------------------------------------------------


def loaded(*steps: tuple[float, int]) -> OutputLoad:
    """After steps of so many seconds, in which collectives gave so many bytes."""
    load, now = OutputLoad(ShadowLimits()), 100.0
    for seconds, size in steps:
        load.begin(now)
        load.add(outputs(size // 2))
        load.add(outputs(size // 2))
        now += seconds
        load.end(now, counts=True)
    return load


def test_outputs_may_take_half_of_the_link() -> None:
    """Steps count together, since the source has memory for those of a single one."""
    load = loaded((2.0, 400), (2.0, 4000), (2.0, 400))

    assert load.excess("plan", 0, 1600.0) == ""
    assert "exceed half" in load.excess("plan", 0, 1599.0)


def test_only_steps_in_which_a_joiner_is_copied_count() -> None:
    """Of the others the outputs are not added up, so that their time must not count either, not
    even after a copy that was given up in the middle of a step."""
    load = loaded((2.0, 4000))
    load.end(500.0, counts=True)
    load.begin(600.0)
    load.end(9000.0, counts=False)
    load.add(outputs(1 << 20))
    load.begin(9900.0)
    load.end(9902.0, counts=True)

    assert load.excess("plan", 0, 2000.0) == ""
    assert "exceed half" in load.excess("plan", 0, 1999.0)


def test_gradients_must_be_much_less_than_outputs() -> None:
    """Those of DDP are as large, so that the joiner had better compute its steps itself."""
    load = loaded((2.0, 4000))

    assert load.excess("plan", 2001, 1.0) == ""
    assert load.excess("plan", 2000, 1.0)
    assert not load.spares(2001)
    assert load.spares(2000)
    assert not OutputLoad(ShadowLimits()).spares(0), "no step was counted"


def test_a_link_that_was_not_measured_gets_all_outputs() -> None:
    assert loaded((1.0, 1 << 20)).excess("plan", 0, 0.0) == ""


def test_outputs_that_did_not_fit_are_not_tried_again_in_the_same_plan() -> None:
    """The next one may have another joiner, with another link."""
    load = OutputLoad(ShadowLimits())
    load.overflow("plan")

    assert load.excess("plan", 0, 1e12) == "its outputs have exceeded the link"
    assert load.excess("next", 0, 1e12) == ""


def test_the_configuration_may_choose_gradients() -> None:
    assert chosen().excess("plan", 1, 0.0) == '[shadow] mirror = "gradients"'


def test_only_large_frames_show_the_rate_of_a_link() -> None:
    """Smaller ones wait in the kernel. Of the large ones the fastest counts."""
    rate = LinkRate()
    rate.sent(LARGE - 1, 1e-6)
    unknown = rate.bytes_per_s
    for seconds in (2.0, 1.0, 4.0):
        rate.sent(LARGE, seconds)

    assert unknown == 0
    assert rate.bytes_per_s == LARGE


def averaging() -> nn.Module:
    """Its buffers have megabytes."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 65536), nn.Linear(65536, 1))
    model.register_buffer("averages", zeros(1 << 20))
    return model


def adapted() -> nn.Module:
    """Nearly all of its parameters are frozen."""
    model = nn.Sequential(nn.Linear(6, 65536), nn.Linear(65536, 1), nn.Linear(1, 1))
    return model.requires_grad_(False).append(nn.Linear(1, 1))


def all_of(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1)]


def adapters_of(model: nn.Module) -> list[Optimizer]:
    return [SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]


# --- the rank's side ------------------------------------------------------------------------------


def test_the_rank_sends_gradients_and_boundaries_and_no_outputs() -> None:
    with show(trained=2, load=chosen()) as s:
        s.arrive()
        for _ in range(3):
            s.begin()
            s.shown.output("0", "allreduce", outputs(8))
            s.shown.send_result("@vote", b"x")
            s.commit()
        s.ear.until(lambda: len(s.ear.of(Boundary)) == 4)
        s.shown.drop("the test is over")
        s.ear.end()
        received = [type(frame) for frame, _ in s.ear.received]
        kinds = [k for k in received if k is not DigestCheck]

        assert kinds[kinds.index(GradientsOnly) :] == [
            GradientsOnly,
            Boundary,
            *[frames.Tail, Boundary] * 3,
            frames.Tail,
            Dropped,
        ]
        assert all(f.rest is not None for f in s.ear.of(Boundary))


def test_a_joiner_in_step_still_gets_gradients() -> None:
    """Unlike one that gets outputs, which computes them itself."""
    with show(load=chosen()) as s:
        s.arrive()
        s.ear.say(Settled(s.step))
        s.ear.until(lambda: s.shown.holds(s.step + 1))
        s.train(2)
        steps = {s.step - 2, s.step - 1}
        s.ear.until(lambda: {tail.step for tail in s.ear.of(frames.Tail)} >= steps)

        assert s.ear.of(Boundary)[-1].rest is not None


def test_outputs_that_pile_up_are_followed_by_gradients_at_the_next_try() -> None:
    """The joiner of a plan may come back, and nothing that it cannot use is sent before."""
    narrow = structs.replace(FAST, staging_mb=8)
    with show(limits=narrow, buffer=UNREAD, load=loaded((1.0, 1 << 20))) as s:
        s.arrive()
        s.ear.may_read.clear()
        s.until_over(lambda: s.shown.output("0", "allreduce", outputs(400_000)))
        s.ear.end()
        last = s.ear.received[-1][0]

        assert last == Dropped(BEHIND, final=False)
        assert len(s.ear.of(Output)) * 400_000 < 6_000_000
        assert s.load.excess("plan", 0, 0.0)


@pytest.mark.parametrize("optimize", [all_of, adapters_of])
def test_frozen_parameters_do_not_count_as_gradients(optimize: Optimize) -> None:
    """Adapters of a large model have small gradients, whatever the model has."""
    narrow = structs.replace(FAST, staging_mb=8)
    script = Script(1, optimize, adapted)
    assert Units(script.registry()).nbytes > 1 << 20
    with show(script, limits=narrow, buffer=UNREAD, load=loaded((1.0, 1 << 20))) as s:
        s.arrive()
        s.ear.may_read.clear()
        s.until_over(lambda: s.shown.output("0", "allreduce", outputs(400_000)))
        s.ear.end()

        assert s.ear.received[-1][0] == Dropped(BEHIND, final=False)


def test_a_joiner_that_was_in_step_does_not_come_back() -> None:
    """It is slow, since its link has carried the outputs before."""
    narrow = structs.replace(FAST, staging_mb=8)
    with show(limits=narrow, buffer=UNREAD, load=loaded((1.0, 1 << 20))) as s:
        s.arrive()
        s.ear.say(Settled(s.step))
        s.ear.until(lambda: s.shown.holds(s.step + 1))
        s.ear.may_read.clear()
        s.until_over(lambda: s.shown.output("0", "allreduce", outputs(400_000)))
        s.ear.end()

        assert s.ear.received[-1][0] == Dropped(BEHIND, final=True)


def test_a_slow_link_is_found_while_the_state_is_copied() -> None:
    with show(load=loaded((1.0, 1 << 20))) as s:
        s.shown._link_rate.sent(LARGE, LARGE / 2e6)
        s.arrive()

        assert s.ear.of(GradientsOnly) == [
            GradientsOnly(
                "the 1 MB of outputs in a step of 1 s exceed half of the 2 MB/s of the link"
            )
        ]


def test_an_adopted_rank_is_followed_by_its_outputs() -> None:
    """Its holder stays, and compares no state at the switch."""
    with show(load=chosen(), adopted=True) as s:
        s.arrive()

        assert s.shown.live


def test_gradients_that_pile_up_end_the_shadow() -> None:
    narrow = structs.replace(FAST, staging_mb=8)
    with show(Script(1, build=wide), narrow, buffer=UNREAD, load=chosen()) as s:
        s.arrive()
        s.ear.may_read.clear()
        s.until_over(lambda: s.train(1))
        s.ear.end()

        assert s.ear.received[-1][0] == Dropped(BEHIND, final=True)


def test_a_hot_standby_gets_outputs_whatever_they_cost() -> None:
    """It may have to finish a step."""
    with show(load=chosen(), plan="") as s:
        s.arrive()

        assert s.shown.live
        assert s.ear.of(GradientsOnly) == []


def test_hand_over_concerns_only_those_that_follow_gradients() -> None:
    with show() as s:
        s.arrive()
        s.shown.hand_over(s.step, Position(0, s.step))
        live = s.shown.live
        s.shown.drop("the test is over")
        s.ear.end()

        assert live
        assert s.ear.of(HandOver) == []


def test_without_room_for_the_last_frames_the_joiner_gets_the_whole_state() -> None:
    """It has won the vote, so that it must not refuse."""
    narrow = structs.replace(FAST, staging_mb=8)
    with show(Script(1, build=averaging), narrow, buffer=UNREAD, load=chosen()) as s:
        s.arrive()
        s.ear.may_read.clear()
        while s.shown._outbox.put(HandOver(0), outputs(400_000)):
            pass
        s.shown.hand_over(s.step, Position(0, s.step))
        s.ear.end()

        assert s.ear.received[-1][0] == Dropped(HANDED_OVER, final=False)
        assert s.ear.of(Boundary)[-1].step < s.step
        assert HandOver(s.step) not in s.ear.of(HandOver)


# --- the joiner's side ----------------------------------------------------------------------------


def by_gradients(p: Pair) -> None:
    """From the first copied unit on."""
    p.source.load = chosen()
    p.meet()


def followed(p: Pair, steps: int) -> None:
    """Steps in which the source waits until the joiner has verified the beginning of each."""
    for _ in range(steps):
        p.source.begin()
        p.joiner.until(lambda: p.joiner.at >= p.source.step or p.joiner.error is not None)
        if p.joiner.error is not None:
            raise p.joiner.error
        p.source.commit()


NOT_FOLLOWED: dict[str, Callable[[int], Script]] = {
    "average outside of optimizers": Averaged,
    "closure": Closed,
    "sparse gradients": Sparse,
}


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_gradients_lead_to_the_same_bits_up_to_the_switch(make: Callable[[int], Script]) -> None:
    """No step is computed here. The joiner falls behind, and jumps. At the switch it gets what the
    last step has changed besides."""
    with pair(make) as p:
        by_gradients(p)
        followed(p, 3)
        source, joiner = p.source, p.joiner
        joiner.may_go_on.clear()
        behind = joiner.at
        source.train(3)
        joiner.until(lambda: joiner.shadow.newest_boundary() == source.step - 1)
        joiner.may_go_on.set()
        followed(p, 2)
        assert source.mirror is not None
        source.mirror.hand_over(source.step, Position(0, source.step))
        joiner.until(lambda: joiner.won or joiner.error is not None)

        assert joiner.won
        assert joiner.following.follows_tails
        assert joiner.following.step == source.step
        assert not joiner.following.has_state  # until the leaver has compared it
        assert joiner.computed == 0
        assert behind + 2 not in joiner.pictures
        p.assert_equal()
        joiner._stand(source.step)
        p.assert_equal()


def test_in_step_only_after_gradients_led_to_an_equal_state() -> None:
    """Steps that are too short for a digest prove nothing."""
    with pair(Script) as p:
        by_gradients(p)
        p.source.train(2, shut=True)
        p.source.begin(shut=True)
        p.joiner.until(lambda: p.joiner.following.step == p.source.step)
        unproved = p.joiner.following.in_step
        p.source.commit()
        followed(p, 1)

        assert (unproved, p.joiner.following.in_step) == (False, True)
        assert p.joiner.following.status().note == (
            'by gradients only, since [shadow] mirror = "gradients"'
        )


def test_gradients_that_differ_later_are_told_from_those_that_never_fit() -> None:
    """The operator may look at the optimizer, or at the machine."""
    with pair(lambda seed: Averaged(seed, every=20), trained=2) as p:
        by_gradients(p)
        with pytest.raises(CopyInstead, match=r"another state after equal ones since step \d+: "):
            followed(p, 60)


def test_the_source_learns_at_each_step_where_the_joiner_is() -> None:
    """A switch waits for it."""
    with pair(lambda seed: Script(seed, build=normed)) as p:
        by_gradients(p)
        followed(p, 3)
        steps = [f.step for f in p.joiner.shadow.frames if isinstance(f, Settled)]

        assert steps[-2:] == [p.source.step - 2, p.source.step - 1]


@pytest.mark.parametrize("make", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED.keys())
def test_what_gradients_cannot_reproduce_is_copied_at_the_switch(
    make: Callable[[int], Script],
) -> None:
    """Training never waits for a whole copy whose next step the joiner could not follow either."""
    with pair(make) as p:
        by_gradients(p)
        with pytest.raises(CopyInstead, match="they lead to another state: parameters"):
            followed(p, 60)
