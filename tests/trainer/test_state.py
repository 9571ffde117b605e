"""The content of a state, whether it fits, and that replacing it changes nothing else."""

import copy
import signal
from collections import Counter
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import msgpack
from torch import nn

from tests.trainer.contexts import context_of
from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.layout import Layout, Layouts, flatten, unflatten
from tmd.trainer.state.state import Registry, mismatch


def build(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def move(source: Registry, target: Registry) -> None:
    """A transfer without the network: through bytes for the layout, by copy for the tensors."""
    layouts, tensors = source.collect()
    received, pending = target.place(msgpack.decode(msgpack.encode(layouts), type=Layouts))
    with torch.no_grad():
        for ours, theirs in zip(received, tensors, strict=True):
            ours.copy_(theirs)
    for late in pending:
        late.apply()


def assert_equal(left: object, right: object) -> None:
    here, there = flatten(left), flatten(right)
    assert here[0] == there[0]
    assert all(torch.equal(a, b) for a, b in zip(here[1], there[1], strict=True))


@pytest.mark.parametrize("warm", [0, 3], ids=["cold joiner", "warm joiner"])
@pytest.mark.parametrize("done", [0, 2], ids=["before the first step", "in training"])
def test_model_optimizer_and_scheduler_arrive_whole(warm: int, done: int) -> None:
    """The joiner has exactly the source's state, whatever it has run before."""
    source, target = build(), build()
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for _, o in (source, target)]
    train(*source, done)
    train(*target, warm)
    for _ in range(done):
        schedules[0].step()

    move(
        Registry({"model": source[0], "optimizer": source[1], "scheduler": schedules[0]}),
        Registry({"model": target[0], "optimizer": target[1], "scheduler": schedules[1]}),
    )

    assert_equal(source[0].state_dict(), target[0].state_dict())
    assert_equal(source[1].state_dict(), target[1].state_dict())
    assert schedules[0].state_dict() == schedules[1].state_dict()


def test_a_warm_joiner_receives_in_place() -> None:
    """A joiner that has run an iteration needs no second copy of parameters and moments."""
    source, target = build(), build()
    train(*source, 2)
    train(*target, 1)
    registry = Registry({"model": target[0], "optimizer": target[1]})
    own = {t.data_ptr() for t in registry.collect()[1]}

    received, _ = registry.place(
        Registry({"model": source[0], "optimizer": source[1]}).collect()[0]
    )

    assert {t.data_ptr() for t in received} == own


@pytest.mark.parametrize("warm", [0, 2])
def test_a_parameter_of_no_module_moves_with_its_optimizer(warm: int) -> None:
    """As in pieces, so in the whole state: otherwise only the joiner's would differ."""

    def registered(value: float) -> tuple[torch.Tensor, torch.optim.Optimizer, Registry]:
        model, scale = nn.Linear(3, 3), torch.full((2,), value, requires_grad=True)
        optimizer = torch.optim.AdamW([*model.parameters(), scale])
        return scale, optimizer, Registry({"model": model, "optimizer": optimizer})

    scale, optimizer, source = registered(1.0)
    other, others, target = registered(2.0)
    for param, steps, by in ((scale, 3, optimizer), (other, warm, others)):
        for _ in range(steps):
            param.grad = param.detach().clone()
            by.step()
    assert not torch.equal(scale, other)

    move(source, target)

    assert torch.equal(scale, other)


def test_training_goes_on_identically_after_a_move() -> None:
    """The oracle: the joiner's next steps are bit for bit the source's."""
    source, target = build(), build()
    train(*source, 3)
    train(*target, 2)
    move(
        Registry({"model": source[0], "optimizer": source[1]}),
        Registry({"model": target[0], "optimizer": target[1]}),
    )
    for pair in (source, target):
        torch.manual_seed(5)
        train(*pair, 3)

    assert_equal(source[0].state_dict(), target[0].state_dict())


def test_another_model_is_refused_with_names_and_shapes() -> None:
    """The message names the tensor and the difference."""
    ours, theirs = build(4), build(6)

    reason = mismatch(
        Registry({"model": ours[0], "optimizer": ours[1]}).collect()[0],
        Registry({"model": theirs[0], "optimizer": theirs[1]}).collect()[0],
    )

    assert "model.0.weight: [4, 4] float32 here, [6, 6] float32 there" in reason


def test_an_object_without_state_is_refused_by_name() -> None:
    """register() names an object that cannot move at once."""
    with pytest.raises(TypeError, match=r"register\(sched=\.\.\.\): int has no state_dict"):
        Registry({"sched": 3})


def test_a_value_that_cannot_move_is_named_by_its_path() -> None:
    """The message has the path of the value that is neither tensor nor plain."""
    with pytest.raises(StateMismatch, match=r"opt\.state\[1\] is a function"):
        flatten({"state": [1, test_an_object_without_state_is_refused_by_name]}, "opt")


def test_flatten_and_unflatten_are_inverse() -> None:
    """Containers, plain values and tensors come back as they were."""
    value: dict[Any, Any] = {
        "a": [torch.arange(3), None, (1.5, "x")],
        7: {"b": torch.ones(2, 2), "c": b"z"},
    }

    layout, tensors = flatten(copy.deepcopy(value))
    again = unflatten(
        msgpack.decode(msgpack.encode({"v": layout}), type=Layouts)["v"], iter(tensors)
    )

    assert again["a"][1:] == [None, (1.5, "x")]
    assert torch.equal(again[7]["b"], value[7]["b"])
    assert again[7]["c"] == b"z"


class Mode(StrEnum):
    FAST = "fast"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.str_("x"), "x"),
        (Mode.FAST, "fast"),
        (signal.SIGTERM, 15),
        (True, True),
        (1 << 127, 1 << 127),
        (-(1 << 80), -(1 << 80)),
        (Counter({8: 1, 12: 2}), Counter({8: 1, 12: 2})),
    ],
)
def test_a_value_of_a_subclass_moves_as_the_plain_value(value: object, plain: object) -> None:
    """A schedule may compute with numpy, and a generator of numpy has integers of 128 bits."""
    layout, tensors = flatten({"v": value})
    sent = msgpack.decode(msgpack.encode(layout), type=Layout)
    found = unflatten(sent, iter(tensors))["v"]

    assert found == plain
    assert type(found) is type(plain)


KEYS = [True, False, None, 0.5, b"x", (), (1, 2), (1, ("a", None)), 1 << 70, -(1 << 70)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("made", [dict, Counter])
def test_a_key_that_is_neither_name_nor_number_arrives_as_it_was(key: object, made: Any) -> None:
    """The encoding of messages would refuse it at the joiner, or make another key of it. ``True``
    is not 1 afterwards."""
    value = made({key: 7, "plain": 8})
    layout, tensors = flatten({"v": {"inner": value}})
    sent = msgpack.decode(msgpack.encode({"v": layout}), type=Layouts)["v"]
    found = unflatten(sent, iter(tensors))["v"]["inner"]

    assert found == value
    assert type(found) is made
    assert list(map(type, found)) == [type(key), str]
    assert sent == layout


def test_tensors_under_such_keys_keep_their_order() -> None:
    value = {(1, 2): torch.ones(2), "a": torch.zeros(3), 0.5: [torch.full((1,), 7.0)]}
    layout, tensors = flatten(value)
    sent = msgpack.decode(msgpack.encode(layout), type=Layout)
    found = unflatten(sent, iter(tensors))

    assert list(found) == list(value)
    assert torch.equal(found[1, 2], value[1, 2])  # type: ignore[arg-type]
    assert torch.equal(found["a"], value["a"])  # type: ignore[arg-type]
    assert torch.equal(found[0.5][0], value[0.5][0])  # type: ignore[index]


@pytest.mark.parametrize(("key", "plain"), [(np.str_("a"), "a"), (Mode.FAST, "fast"), (2.0, 2.0)])
def test_a_key_of_a_subclass_moves_as_the_plain_key(key: object, plain: object) -> None:
    layout, tensors = flatten({key: 1})
    (found,) = unflatten(msgpack.decode(msgpack.encode(layout), type=Layout), iter(tensors))

    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize("key", [torch.float32, torch.ones(1), np.int64(3), (1, torch.float32)])
def test_a_key_that_cannot_move_is_named_when_it_is_registered(key: object) -> None:
    """Otherwise the job would train until the first loss, and stand then without a word."""
    model, optimizer = build()
    table = Like({})
    table.state_dict = lambda: {"seen": {key: 1}}  # type: ignore[method-assign]
    registry = Registry({"model": model, "optimizer": optimizer, "table": table})

    with pytest.raises(StateMismatch, match=r"table\.seen has a key that is a \w+, .*: convert it"):
        context_of(registry)


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    """The state of one of them would be lost when a rank moves, without a word."""
    shared, own = nn.Linear(2, 2), nn.Linear(2, 1)
    first = torch.optim.Adam(shared.parameters())
    second = torch.optim.Adam([*own.parameters(), *shared.parameters()])

    with pytest.raises(TypeError, match=r"shape \[2, 2\] belongs to two optimizers"):
        Registry({"model": nn.ModuleList([shared, own]), "optimizer": [first, second]})
    Registry({"model": shared, "optimizer": first, "again": first})


def test_an_optimizer_with_other_parameter_groups_does_not_fit() -> None:
    """The source has added one while it trained: the joiner says so before anything is copied. It
    may still add it itself, so that the models fit."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])
    optimizer = torch.optim.AdamW(model[1].parameters())
    registry = Registry({"model": model, "optimizer": optimizer})
    theirs = registry.collect()[0]
    optimizer.add_param_group({"params": list(model[0].parameters())})
    ours = registry.collect()[0]

    assert registry.other_groups(theirs).startswith(
        "optimizer: parameter groups of [2, 2] parameters here, of [2] there: "
    )
    assert registry.other_groups(ours) == ""
    assert mismatch(ours, theirs) == ""


class Partial(torch.optim.SGD):
    """Its state leaves out a frozen group."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "param_groups": state["param_groups"][:1]}


def test_an_optimizer_whose_state_shows_fewer_groups_fits_an_equal_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = Partial([{"params": part.parameters()} for part in model], lr=0.1)
    registry = Registry({"model": model, "optimizer": optimizer})

    assert registry.other_groups(registry.collect()[0]) == ""


def test_a_parameter_that_no_module_has_does_not_fit_if_it_was_added_later() -> None:
    """One that was there at the registration moves. Of this one nobody would miss the values."""
    model = nn.Linear(2, 2)
    early, late = (nn.Parameter(torch.zeros(n)) for n in (3, 5))
    optimizer = torch.optim.AdamW([*model.parameters(), early])
    registry = Registry({"model": model, "optimizer": optimizer})
    before = registry.other_groups(registry.collect()[0])
    optimizer.add_param_group({"params": [late]})

    assert before == ""
    assert "of shape [5] since it was registered" in registry.other_groups(registry.collect()[0])


class Like:
    """Its state has the keys of an optimizer, but is none's."""

    def __init__(self, groups: object) -> None:
        self.groups = groups

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = state["param_groups"]


@pytest.mark.parametrize("groups", [7, {}, [1], [{"lr": 0.1}], [{"params": 3}], [{"params": []}]])
def test_what_only_looks_like_an_optimizer_is_compared_without_an_error(groups: object) -> None:
    """On either side: the worker that compares would end."""
    model, optimizer = build()
    real = Registry({"model": model, "optimizer": optimizer})
    like = Registry({"model": model, "optimizer": Like(groups)})
    layouts = [each.collect()[0] for each in (real, like)]

    assert mismatch(layouts[0], layouts[1]) == mismatch(layouts[1], layouts[0]) == ""
    assert like.other_groups(layouts[0]) == like.other_groups(layouts[1]) == ""
    assert bool(real.other_groups(layouts[1])) is (groups == [{"params": []}])


def test_a_joiner_without_optimizer_state_gets_it_on_the_device_of_its_parameters() -> None:
    """Step counters stay on the CPU, where the optimizer keeps them."""
    source = build()
    train(*source, 2)
    model, _ = build()
    model.to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    registry = Registry({"model": model, "optimizer": optimizer})
    layouts = Registry({"model": source[0], "optimizer": source[1]}).collect()[0]
    _, pending = registry.place({"optimizer": layouts["optimizer"]})
    for late in pending:
        late.apply()

    states = [optimizer.state[p] for p in model.parameters() if optimizer.state[p]]
    assert states
    assert {s["exp_avg"].device.type for s in states} == {"meta"}
    assert {s["step"].device.type for s in states} == {"cpu"}


def test_optimizer_state_that_is_kept_in_host_memory_stays_there() -> None:
    """It is in place already, and only plain values are set."""
    registries = []
    for rate in (0.1, 0.2):
        model = nn.Linear(4, 4, device="meta")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for param in model.parameters():
            optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(param.shape)}
        registries.append(Registry({"optimizer": optimizer, "model": model}))
    layouts = registries[1].collect()[0]
    _, pending = registries[0].place({"optimizer": layouts["optimizer"]})
    for late in pending:
        late.apply()

    (placed,) = registries[0].optimizers
    assert placed.param_groups[0]["lr"] == 0.2
    found = {t.device.type for state in placed.state.values() for t in state.values()}
    assert found == {"cpu"}


def test_the_order_in_which_an_optimizer_met_its_parameters_is_no_part_of_the_state() -> None:
    """Otherwise a state could not replace one that was built up in another order."""
    layouts = []
    for first in (0, 1):
        params = [nn.Parameter(torch.ones(n + 1)) for n in range(2)]
        optimizer = torch.optim.AdamW(params, lr=0.1)
        for met in (first, 1 - first):
            for number, param in enumerate(params):
                param.grad = torch.ones_like(param) if number == met else None
            optimizer.step()
        layouts.append(Registry({"optimizer": optimizer}).collect()[0])

    assert list(optimizer.state_dict()["state"]) == [1, 0]
    assert layouts[0] == layouts[1]


def test_a_state_that_is_neither_parameter_nor_buffer_is_refused() -> None:
    """It would silently stay behind."""

    class Scales(nn.Linear):
        def get_extra_state(self) -> object:
            return {"history": [1.0]}

    model = nn.Sequential(nn.Linear(1, 1), Scales(1, 1))

    with pytest.raises(TypeError, match=r"Scales at 1 has extra state \(get_extra_state\)"):
        Registry({"model": model})


def test_what_a_module_saves_by_itself_is_refused_unless_it_is_a_buffer() -> None:
    class Counts(nn.Linear):
        count: int | None = None

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if self.count is not None:
                destination[prefix + "count"] = torch.tensor(self.count)

    counts = Counts(1, 1)
    Registry({"model": nn.Sequential(nn.LazyBatchNorm1d(), counts)})
    counts.count = 3

    with pytest.raises(TypeError, match="Counts at 1 saves count by _save_to_state_dict"):
        Registry({"model": nn.Sequential(nn.Linear(1, 1), counts)})
    counts.requires_grad_(False)  # as a quantized layer under adapters
    Registry({"model": nn.Sequential(nn.Linear(1, 1), counts)})
