"""The rank that a standby is built for, and other ranks that it can serve."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
"""Four stages, twice; the two in the middle have equal structure."""


def roles(built: int, known: tuple[Role, ...] = PIPELINE, *, several: bool = True) -> Roles:
    made = Roles(several=several)
    made.built, made.known = built, known
    return made


def test_a_build_serves_the_replicas_of_its_rank() -> None:
    """A stage in the middle does not serve the next one despite its equal structure."""
    assert [r for r in range(8) if roles(1).serves(r)] == [1, 5]
    assert [r for r in range(8) if roles(7).serves(r)] == [3, 7]


def test_any_rank_may_fit_until_roles_are_known() -> None:
    """Names and shapes are still checked later."""
    assert all(roles(7, ()).serves(r) for r in range(8))
    assert roles(7, ()).commonest == 7


def test_a_script_that_builds_one_role_is_never_asked_for_another() -> None:
    """It is refused by names and shapes, and impersonates the last rank."""
    one = roles(1, several=False)

    assert all(one.serves(r) for r in range(8))
    assert one.commonest == 1
    assert one.resting(8) == 7


def test_an_idle_standby_impersonates_the_last_rank_of_its_role() -> None:
    """It is not the last of all ranks, whose position in the meshes is that of another stage."""
    assert [roles(built).resting(8) for built in range(8)] == [4, 5, 6, 7, 4, 5, 6, 7]
    assert roles(2, ()).resting(8) == 2


def test_a_standby_settles_on_the_commonest_role() -> None:
    """It stays as it is if its role is no rarer."""
    assert [roles(built).commonest for built in range(4)] == [6, 1, 2, 6]
    even = tuple(Role(s, (r,)) for r, s in enumerate((FIRST, LAST)))
    assert [roles(built, even).commonest for built in range(2)] == [0, 1]


def structure(model: nn.Module, *groups: tuple[int, ...]) -> str:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    layouts = Registry({"model": model, "optimizer": optimizer}).collect()[0]
    return structure_of(layouts, [GroupView(str(i), ranks) for i, ranks in enumerate(groups)])


def test_structure_is_names_shapes_types_and_sizes_of_groups() -> None:
    """Values and positions in groups do not count."""
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


def test_the_built_object_is_available_in_the_loop(session: Session) -> None:
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
    loop = session.batches([torch.ones(4, 2)])
    next(loop)
    refusal = pytest.raises(RuntimeError, match="no registered optimizer was called")

    with nullcontext() if enabled else refusal, session.step() as step:
        pass

    assert step.counts == enabled


def test_a_build_function_that_registers_nothing_is_refused(session: Session) -> None:
    """Its state would be lost silently."""
    with pytest.raises(RuntimeError, match=r"must call register\(\)"):
        session.build(lambda _: None)


def test_build_is_called_once_and_register_only_in_its_function(session: Session) -> None:
    """Two statements of what moves would contradict each other."""
    session.build(linear)
    with pytest.raises(RuntimeError, match="once"):
        session.build(linear)
    with pytest.raises(RuntimeError, match="called twice"):
        linear(session)


def test_old_objects_are_released_before_a_rebuild(session: Session) -> None:
    """A device may not hold both. The old object is released although it refers to itself."""
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
    for _ in range(2):
        session._registry.renew({})
        session._wrapped.clear()
        session._local.renew()
        session._make()

    assert found == [[], [None], [None, None]]


def test_ddp_is_known_after_a_rebuild(session: Session) -> None:
    """A step watches it, and makes it broadcast its buffers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def build(session: Session) -> DistributedDataParallel:
        model = DistributedDataParallel(nn.Linear(2, 1))
        session.register(model=model, optimizer=SGD(model.parameters(), lr=0.1))
        return model

    try:
        session.build(build)
        session._make()
    finally:
        dist.destroy_process_group()

    assert session._registry is not None
    assert session._registry.wrappers == [session.built]
    assert session._registry.buckets == "1 0"


def test_ranks_that_own_different_parts_do_not_have_equal_state() -> None:
    """A script may declare it; a standby would then keep the state of another rank's part."""
    parts = [Role("s", alike, part=part) for alike, part in (((0, 3), "a"), ((1,), "b"))]
    parts += [Role("s", (2,), part="a"), Role("s", (0, 3), part="b")]

    assert "ranks 0 and 3 own different parameters" in contradiction(parts)
    assert contradiction([replace(r, part="") for r in parts]) == ""


def test_ranks_of_equal_state_must_sum_gradients_in_the_same_buckets() -> None:
    built = [
        Role("s", alike, buckets=b) for alike, b in (((0, 2), "a"), ((1,), "b"), ((0, 2), "b"))
    ]

    assert "buckets on rank 0 than on rank 2: build Distributed" in contradiction(built)
    assert contradiction([replace(r, buckets="a") for r in built]) == ""
