"""As which rank a standby is built, and which others that serves."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD

from tmd.fabric import GroupView
from tmd.trainer import Session
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.state.roles import Role, Roles, contradiction, structure_of
from tmd.trainer.state.state import Registry

FIRST, MIDDLE, LAST = "first", "middle", "last"
PIPELINE = tuple(
    Role(structure, (stage, stage + 4))
    for _ in range(2)
    for stage, structure in enumerate((FIRST, MIDDLE, MIDDLE, LAST))
)
"""Four stages, twice; the two in the middle look alike."""


def roles(built: int, known: tuple[Role, ...] = PIPELINE, *, several: bool = True) -> Roles:
    made = Roles(several=several)
    made.built, made.known = built, known
    return made


def test_what_is_built_serves_the_replicas_of_its_rank() -> None:
    """A stage in the middle does not serve the next one, though it looks the same."""
    assert [r for r in range(8) if roles(1).serves(r)] == [1, 5]
    assert [r for r in range(8) if roles(7).serves(r)] == [3, 7]


def test_until_others_are_heard_everything_may_fit() -> None:
    """The check of names and shapes still follows."""
    assert all(roles(7, ()).serves(r) for r in range(8))
    assert roles(7, ()).commonest == 7


def test_a_script_that_builds_one_role_is_never_asked_for_another() -> None:
    """It is refused by names and shapes, as ever, and rests as the last rank."""
    one = roles(1, several=False)

    assert all(one.serves(r) for r in range(8))
    assert one.commonest == 1
    assert one.resting(8) == 7


def test_a_standby_rests_as_the_last_rank_that_is_built_as_it_is() -> None:
    """Not as the last of all, whose place in the meshes would not be that of its stage."""
    assert [roles(built).resting(8) for built in range(8)] == [4, 5, 6, 7, 4, 5, 6, 7]
    assert roles(2, ()).resting(8) == 2


def test_a_standby_settles_on_what_most_ranks_look_like() -> None:
    """And stays where it is if that is no rarer."""
    assert [roles(built).commonest for built in range(4)] == [6, 1, 2, 6]
    even = tuple(Role(s, (r,)) for r, s in enumerate((FIRST, LAST)))
    assert [roles(built, even).commonest for built in range(2)] == [0, 1]


def structure(model: nn.Module, *groups: tuple[int, ...]) -> str:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    layouts = Registry({"model": model, "optimizer": optimizer}).collect()[0]
    return structure_of(layouts, [GroupView(str(i), ranks) for i, ranks in enumerate(groups)])


def test_structure_is_names_shapes_types_and_sizes_of_groups() -> None:
    """Values and places in groups are not."""
    one = structure(nn.Linear(2, 3), (0, 1))

    assert structure(nn.Linear(2, 3), (2, 3)) == one
    others = [
        structure(nn.Linear(3, 3), (0, 1)),
        structure(nn.Linear(2, 3).double(), (0, 1)),
        structure(nn.Sequential(nn.Linear(2, 3)), (0, 1)),
        structure(nn.Linear(2, 3), (0, 1, 2)),
        structure(nn.Linear(2, 3)),
    ]
    assert len({one, *others}) == 6


# --- session.build --------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    return Session(StandaloneHooks())


def linear(session: Session) -> tuple[nn.Linear, SGD]:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    return model, optimizer


def test_what_is_built_is_at_hand_in_the_loop(session: Session) -> None:
    """A script without a daemon trains with it as with any other."""
    model, _ = session.build(linear)
    before = model.weight.clone()
    for batch in session.batches([torch.ones(4, 2)] * 2):
        built, optimizer = session.built
        with session.step():
            built(batch).sum().backward()
            optimizer.step()

    assert session.built[0] is model
    assert session.step_number == 3
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_only_an_enabled_scaler_may_leave_the_optimizer_out(
    session: Session, enabled: bool
) -> None:
    """It skips a step whose gradients overflow; a disabled one calls the optimizer in each step."""
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    model = nn.Linear(2, 1)
    session.register(model=model, optimizer=SGD(model.parameters()), scaler=scaler)
    next(iter(session.batches([torch.ones(4, 2)])))
    refusal = pytest.raises(RuntimeError, match="no registered optimizer was called")

    with nullcontext() if enabled else refusal, session.step() as step:
        pass

    assert step.counts == enabled


def test_a_function_that_registers_nothing_is_told_so(session: Session) -> None:
    """Or its state would be lost in silence."""
    with pytest.raises(RuntimeError, match=r"must call register\(\)"):
        session.build(lambda _: None)


def test_building_is_said_once_and_registering_inside_it(session: Session) -> None:
    """Two ways to say what moves would contradict each other."""
    session.build(linear)
    with pytest.raises(RuntimeError, match="once"):
        session.build(linear)
    with pytest.raises(RuntimeError, match="called twice"):
        linear(session)


def test_what_was_built_before_is_gone_when_others_are_built(session: Session) -> None:
    """A device may not hold both. Here it is let go of, but it refers to itself."""
    found = []
    before: list[weakref.ref[nn.Module]] = []

    def build(session: Session) -> nn.Module:
        found.append([model() for model in before])
        model, _ = linear(session)
        model.forward = model.forward  # type: ignore[method-assign]
        before.append(weakref.ref(model))
        return model

    session.build(build)
    assert session._registry is not None
    assert session._local is not None
    session._registry.renew({})
    session._wrapped.clear()
    session._local.renew()
    session._make()

    assert found == [[], [None]]


def test_ranks_that_own_other_parts_are_not_of_equal_state() -> None:
    """A script may say so; a standby would then keep the state of what another rank owns."""
    parts = [Role("s", alike, part=part) for alike, part in (((0, 3), "a"), ((1,), "b"))]
    parts += [Role("s", (2,), part="a"), Role("s", (0, 3), part="b")]

    assert "ranks 0 and 3 own different parameters" in contradiction(parts)
    assert contradiction([replace(r, part="") for r in parts]) == ""
