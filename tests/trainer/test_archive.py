"""Names in a checkpoint, and ranks that can resume from it, without processes."""

from __future__ import annotations

import fcntl
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import json
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from tests.trainer.waiting import PATIENCE_S, wait_for
from tmd.core.values.checkpoints import PARTIAL, name_of
from tmd.core.values.errors import StateMismatch
from tmd.trainer.checkpoints import archive, disk
from tmd.trainer.checkpoints.naming import Names
from tmd.trainer.checkpoints.placing import placing
from tmd.trainer.checkpoints.resuming import check, restore
from tmd.trainer.checkpoints.saving import Saving, ordered
from tmd.trainer.checkpoints.staging import StagedState
from tmd.trainer.state.data import Position
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.replicas import Partition, all_different
from tmd.trainer.state.state import Registry

STEP, SEED, WIDTH = 10, 7, 3


class Stage:
    """A rank with some layers of a model: each has a linear layer and a BatchNorm."""

    def __init__(
        self, layers: Sequence[str], seed: int, kind: type[torch.optim.Optimizer] = AdamW
    ) -> None:
        torch.manual_seed(seed)
        made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in layers]
        self.model = nn.Sequential(OrderedDict(zip(layers, made, strict=True)))
        self.optimizer = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        self.registry = Registry(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )

    def train(self) -> Stage:
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, WIDTH)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def layer(self, name: str) -> str:
        """Digest of one of the layers, of its buffers and of its optimizer state."""
        layer = self.model.get_submodule(name)
        kept = [v for p in layer.parameters() for v in self.optimizer.state[p].values()]
        return digest_of([*layer.state_dict().values(), *kept])


def part(folder: Path, stage: Stage, rank: int, size: int, run: str) -> None:
    staged = StagedState(Names(stage.registry, all_different(size)), rank, STEP, Position(), SEED)
    staged.finish()
    staged.settled.set()
    archive.write_part(folder, staged, size, run)


def saved(
    folder: Path, stages: Sequence[Stage], alike: Partition | None = None
) -> archive.CheckpointReader:
    size = len(stages)
    for rank, stage in enumerate(stages):
        names = Names(stage.registry, alike or all_different(size))
        staged = StagedState(names, rank, STEP, Position(0, STEP), SEED)
        staged.finish()
        assert staged.broken is None
        staged.settled.set()
        archive.write_part(folder, staged, size)
    archive.join_parts(folder, STEP, size)
    return archive.CheckpointReader(folder, STEP)


def gone_on(
    reading: archive.CheckpointReader, stages: Sequence[Stage], alike: Partition | None = None
) -> None:
    """Let all ranks resume, as those of a job do."""
    names = [Names(stage.registry, alike or all_different(len(stages))) for stage in stages]
    claims = [each.claims(rank) for rank, each in enumerate(names)]
    place = placing(reading.saved, claims)
    awaited = [name for each in names for name in each.awaited()]
    check(reading, claims, place, len(stages), awaited)
    for rank, each in enumerate(names):
        restore(reading, each, place, rank, len(stages), SEED)


def fresh(*layers: str) -> list[Stage]:
    """A rank for each word, whose letters are its layers."""
    return [Stage(word, seed=90 + rank) for rank, word in enumerate(layers)]


@pytest.mark.parametrize("division", [("abcd",), ("ab", "cd"), ("a", "b", "c", "d"), ("abc", "d")])
def test_layers_numbered_through_can_be_divided_differently(
    tmp_path: Path, division: tuple[str, ...]
) -> None:
    before = [Stage("ab", 1).train(), Stage("cd", 2).train()]
    reading = saved(tmp_path, before)

    after = fresh(*division)
    gone_on(reading, after)

    told = {name: s.layer(name) for s in before for name, _ in s.model.named_children()}
    assert {name: s.layer(name) for s in after for name, _ in s.model.named_children()} == told
    assert [s.scheduler.last_epoch for s in after] == [2] * len(after)
    assert {s.optimizer.param_groups[0]["lr"] for s in after} == {0.1 * 0.5**2}


def test_plain_torch_finds_each_layer_by_its_name(tmp_path: Path) -> None:
    saved(tmp_path, [Stage("ab", 1).train(), Stage("cd", 2).train()])
    dcp_to_torch_save(tmp_path / name_of(STEP), tmp_path / "single.pt")

    whole = torch.load(tmp_path / "single.pt", weights_only=True)

    assert set(whole["model"]) == set(Stage("abcd", 3).model.state_dict())
    assert {name.split(".")[0] for name in whole["optimizer"]["state"]} == set("abcd")
    assert whole["rank1"]["optimizer"]["param_groups"][0]["params"][0] == "c.0.weight"


def test_layers_of_equal_names_resume_on_their_own_stage(tmp_path: Path) -> None:
    """With equally many ranks, and with fewer replicas of each stage."""
    stages = [Stage("a", 1).train(), Stage("a", 2).train()]
    replicas: Partition = ((0, 2), (1, 3))
    reading = saved(tmp_path, [*stages, *stages], replicas)

    for after, alike in ((fresh("a", "a"), None), (fresh("a", "a", "a", "a"), replicas)):
        gone_on(reading, after, alike)
        assert [s.layer("a") for s in after[:2]] == [s.layer("a") for s in stages]


def test_the_owner_of_an_ambiguous_layer_name_is_not_guessed(tmp_path: Path) -> None:
    """Stages first along the mesh, then replicas: with fewer replicas other ranks are the second
    stage. So is a whole model that is divided into two with equal layer names."""
    stages = [Stage("a", 1).train(), Stage("a", 2).train()]
    divided = saved(tmp_path / "1", [stages[0]] * 2 + [stages[1]] * 2, ((0, 1), (2, 3)))
    whole = saved(tmp_path / "2", [Stage("ab", 3).train()])

    for reading in (divided, whole):
        with pytest.raises(StateMismatch, match=r"several ranks use the name model.a"):
            gone_on(reading, fresh("a", "a"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    reading = saved(tmp_path, [Stage("a", 1).train()])

    with pytest.raises(StateMismatch, match=r"has no tensor model.b."):
        gone_on(reading, fresh("ab"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("aa", "aaa"), ("aaa", "aa")),
        (("a", "a", "a", "a"), ("a", "a")),
        (("a", "a", "a", "a"), ("a",)),
        (("a", "b"), ("a",)),
    ],
)
def test_an_unclaimed_entry_is_refused_when_a_job_is_divided_differently(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Each stage numbers its layers from a on: their order in the model is unknown."""
    reading = saved(tmp_path, [s.train() for s in fresh(*map(counted, before))])

    with pytest.raises(StateMismatch, match=r"no rank registers|has no tensor|several ranks use"):
        gone_on(reading, fresh(*map(counted, after)))


def counted(layers: str) -> str:
    return "abcdef"[: len(layers)] if set(layers) == {"a"} else layers


def test_a_state_of_one_of_two_equal_names_stays_with_its_stage(tmp_path: Path) -> None:
    """Both have a layer of the same name, and that of the first one is frozen."""
    stages = [Stage("a", 1), Stage("a", 2).train()]
    reading = saved(tmp_path, stages)

    after = fresh("a", "a")
    gone_on(reading, after)

    assert [s.layer("a") for s in after] == [s.layer("a") for s in stages]
    assert [sum(map(bool, s.optimizer.state.values())) for s in after] == [0, 4]


class Counting(SGD):
    """Keeps a plain number for each parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sum"] = self.state[param].get("sum", 0) + param.numel()
        return super().step(closure)


def test_a_plain_value_of_the_optimizer_moves_with_its_layer(tmp_path: Path) -> None:
    before = [Stage("ab", 1, Counting).train(), Stage("cd", 2, Counting).train()]
    reading = saved(tmp_path, before)

    after = [Stage("abc", 8, Counting), Stage("d", 9, Counting)]
    gone_on(reading, after)

    sums = [[s.optimizer.state[p]["sum"] for p in s.model.parameters()] for s in after]
    assert sums == [[18, 6, 6, 6] * 3, [18, 6, 6, 6]]


def test_buffers_outside_of_state_dict_come_from_the_first_replica(tmp_path: Path) -> None:
    def stage(value: float) -> Stage:
        made = Stage("a", 1)
        made.model.register_buffer("count", torch.tensor(value), persistent=False)
        return made

    reading = saved(tmp_path, [stage(5.0), stage(6.0)], ((0, 1),))
    after = [stage(0.0) for _ in range(3)]
    gone_on(reading, after, ((0, 1, 2),))

    assert [float(s.model.get_buffer("count")) for s in after] == [5.0] * 3


class Masked(nn.Sequential):
    """Makes a buffer, which its state dict contains, in its first forward pass."""

    def __init__(self, value: float) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))
        self.value = value
        self.mask: Tensor | None
        self.register_buffer("mask", None)
        self.register_buffer("own", torch.tensor(value), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((WIDTH,), self.value)
        found: Tensor = super().forward(x) * self.mask
        return found


class MaskedStage(Stage):
    def __init__(self, value: float, *, ran: bool = False) -> None:
        self.model = Masked(value)
        self.registry = Registry({"model": self.model})
        if ran:
            self.model(torch.ones(1, WIDTH))


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "after a forward pass"])
@pytest.mark.parametrize("made", [False, True], ids=["before it is made", "after"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_buffer_that_a_model_makes_is_there_if_the_checkpoint_has_it(
    tmp_path: Path, size: int, made: bool, ran: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank of a job of the same size has all other values of its own, too."""
    reading = saved(tmp_path, [MaskedStage(5.0 + r, ran=made) for r in range(2)], ((0, 1),))
    after = [MaskedStage(1.0, ran=ran) for _ in range(size)]

    gone_on(reading, after, (tuple(range(size)),))

    values = [5.0, 6.0] if size == 2 else [5.0] * 3
    assert [float(s.model.get_buffer("own")) for s in after] == values
    masks = [dict(s.model.named_buffers()).get("mask", torch.zeros(0)).tolist() for s in after]
    assert masks == ([[value] * WIDTH for value in values] if made else [[]] * size)
    assert "which no rank registers" not in caplog.text


class Two:
    """Two models with equal names, of one optimizer, or one model without optimizer."""

    def __init__(self, seed: int, *, both: bool = True, optimizer: str = "optimizer") -> None:
        torch.manual_seed(seed)
        self.models = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        trained = self.models if both else self.models[:1]
        params = [p for model in trained for p in model.parameters()]
        self.optimizer = SGD(params, lr=0.1, momentum=0.9)
        for number, model in enumerate(trained):
            (model(torch.ones(1, WIDTH)).square().sum() * (number + 1)).backward()
        self.optimizer.step()
        self.named = {"model": self.models[0], "ema": self.models[1], optimizer: self.optimizer}

    def only(self, *names: str) -> Registry:
        return Registry({name: self.named[name] for name in names})

    @property
    def momenta(self) -> list[str]:
        return [digest_of([s["momentum_buffer"]]) for s in self.optimizer.state.values()]


def parts(folder: Path, registry: Registry) -> None:
    staged = StagedState(Names(registry, all_different(1)), 0, STEP, Position(0, STEP), SEED)
    staged.finish()
    staged.settled.set()
    archive.write_part(folder, staged, 1)


def written(folder: Path, registry: Registry) -> archive.CheckpointReader:
    parts(folder, registry)
    archive.join_parts(folder, STEP, 1)
    return archive.CheckpointReader(folder, STEP)


def read(reading: archive.CheckpointReader, registry: Registry, size: int = 1) -> None:
    """Let rank 0 of ``size`` replicas resume."""
    names = Names(registry, (tuple(range(size)),))
    claims = [names.claims(0)]
    place = placing(reading.saved, claims)
    check(reading, claims, place, size, names.awaited())
    restore(reading, names, place, 0, size, SEED)


def test_an_optimizer_of_two_models_keeps_them_apart(tmp_path: Path) -> None:
    """Both have parameters of the same names."""
    before, after = Two(1), Two(2)
    reading = written(tmp_path, before.only("model", "ema", "optimizer"))

    read(reading, after.only("model", "ema", "optimizer"))

    assert after.momenta == before.momenta
    assert len(set(before.momenta)) == 4


def test_an_average_that_is_no_longer_registered_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Two(1, both=False), Two(2, both=False)
    reading = written(tmp_path, before.only("model", "ema", "optimizer"))

    read(reading, after.only("model", "optimizer"))

    assert after.momenta == before.momenta
    assert "ema.bias, ema.weight, which no rank registers" in caplog.text


def test_an_optimizer_registered_by_another_name_keeps_its_state(tmp_path: Path) -> None:
    before = Two(1, both=False)
    reading = written(tmp_path, before.only("model", "optimizer"))
    after = Two(2, both=False, optimizer="sgd")

    read(reading, after.only("model", "sgd"))

    assert after.momenta == before.momenta


def two_rates(*, several: bool, order: int = 1, regrouped: bool = False) -> Registry:
    """Two models with a learning rate each, of one optimizer or of two."""
    models = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    first, second = (list(model.parameters()) for model in models)
    if regrouped:
        second.append(first.pop())
    groups = [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}][::order]
    optimizers = [SGD([group]) for group in groups] if several else [SGD(groups)]
    return Registry({"model": models, "optimizer": optimizers})


def rates(registry: Registry) -> list[float]:
    return [group["lr"] for each in registry.optimizers for group in each.param_groups]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("several", [False, True], ids=["groups", "optimizers"])
def test_optimizers_or_groups_in_another_order_are_refused(
    tmp_path: Path, several: bool, size: int
) -> None:
    """Each would get the learning rate of the other."""
    reading = written(tmp_path, two_rates(several=several))
    same, other = two_rates(several=several), two_rates(several=several, order=-1)
    with pytest.raises(StateMismatch, match="their parameter groups, in another order"):
        read(reading, other, size)
    read(reading, same, size)

    assert (rates(same), rates(other)) == ([0.1, 0.2], [0.2, 0.1])


def test_a_parameter_that_is_in_another_group_now_gets_the_values_of_that(tmp_path: Path) -> None:
    reading = written(tmp_path, two_rates(several=False))
    after = two_rates(several=False, regrouped=True)
    for group in after.optimizers[0].param_groups:
        group["lr"] = 0.7
    read(reading, after)

    assert rates(after) == [0.1, 0.2]


def test_a_weight_that_is_no_longer_tied_gets_its_state(tmp_path: Path) -> None:
    """The checkpoint has it once."""

    def rank(*, tied: bool) -> Registry:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        if tied:
            model[1].weight = model[0].weight
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, WIDTH)).square().sum().backward()
        optimizer.step()
        return Registry({"model": model, "optimizer": optimizer})

    before, after = rank(tied=True), rank(tied=False)
    read(written(tmp_path, before), after)

    (tied,), (optimizer,) = before.optimizers, after.optimizers
    wanted = tied.state[before.modules[0].get_parameter("0.weight")]["momentum_buffer"]
    for name in ("0.weight", "1.weight"):
        param = after.modules[0].get_parameter(name)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], wanted)


def test_a_wrapper_in_names_changes_nothing(tmp_path: Path) -> None:
    """Activation checkpointing in a pipeline."""

    def wrapped(stage: Stage) -> Stage:
        name, layer = next(stage.model.named_children())
        setattr(stage.model, name, checkpoint_wrapper(layer))
        return stage

    before = [wrapped(Stage("ab", 1).train()), wrapped(Stage("cd", 2).train())]
    reading = saved(tmp_path, before)
    after = [wrapped(stage) for stage in fresh("ab", "cd")]
    gone_on(reading, after)

    assert [s.layer(n) for s, n in zip(after, "ac", strict=True)] == [
        s.layer(n) for s, n in zip(before, "ac", strict=True)
    ]


def test_tensors_of_schedulers_and_groups_do_not_decide_the_owner(tmp_path: Path) -> None:
    def stage(layers: str, seed: int, last: float) -> Stage:
        made = Stage(layers, seed)
        made.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        made.scheduler.threshold = torch.tensor(last)  # type: ignore[attr-defined]
        return made

    before = [stage("ab", 1, 3.0).train(), stage("cd", 2, 3.0).train()]
    reading = saved(tmp_path, before)
    same = [stage("ab", 7, 0.0), stage("cd", 8, 0.0)]
    gone_on(reading, same)

    assert [s.layer(n) for s, n in zip(same, "ac", strict=True)] == [
        s.layer(n) for s, n in zip(before, "ac", strict=True)
    ]
    assert [float(s.scheduler.threshold) for s in same] == [3.0, 3.0]  # type: ignore[attr-defined]


def test_a_buffer_of_another_size_is_named(tmp_path: Path) -> None:
    def grown(size: int) -> Stage:
        made = Stage("a", 1)
        made.model.register_buffer("cache", torch.ones(size))
        return made

    reading = saved(tmp_path, [grown(1)])

    with pytest.raises(StateMismatch, match=r"buffer 0.cache is of size \[1\], but \[4\] here"):
        gone_on(reading, [grown(4)])


@pytest.mark.parametrize("name", ["tmd", "rank3"])
def test_reserved_names_are_refused(name: str) -> None:
    model = nn.Linear(1, 1)
    registry = Registry({name: model, "optimizer": SGD(model.parameters(), lr=0.1)})
    order = ordered("somewhere", 1, 1, at_end=False)

    with pytest.raises(ValueError, match=name):
        Saving(
            order,
            registry,
            lambda: all_different(1),
            1,
            print,
            lambda: str,
        )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Not the seal, which is in order."""
    place = tmp_path / name_of(STEP)
    (place / "part-0").mkdir(parents=True)  # a folder: reading it fails for root as well
    seal = archive.CheckpointSeal(STEP, Position(), 1, {"part-0": (1, "0")})
    (place / archive.SEAL).write_bytes(json.encode(seal))

    assert archive.flaw(tmp_path, STEP).startswith("part-0 cannot be read: ")


def test_a_parameter_without_a_gradient_has_none_after_resuming(tmp_path: Path) -> None:
    """With zeros in its place the optimizer would apply momentum and weight decay."""
    before, after = Two(1), Two(2)
    before.models[0].bias.grad = None
    after.models[1].bias.grad = None
    reading = written(tmp_path, before.only("model", "ema", "optimizer"))

    read(reading, after.only("model", "ema", "optimizer"))

    params = [p for model in after.models for p in model.parameters()]
    assert [p.grad is not None for p in params] == [True, False, True, True]
    assert not any(bool(p.grad.any()) for p in params if p.grad is not None)


def test_a_changed_seal_is_noticed(tmp_path: Path) -> None:
    """It says where the data go on, of which no file has a digest."""
    written(tmp_path, Two(1).only("model", "ema", "optimizer"))
    file = tmp_path / name_of(STEP) / archive.SEAL
    whole = archive.flaw(tmp_path, STEP)
    file.write_bytes(file.read_bytes().replace(b'"size":1', b'"size":2'))

    assert whole == ""
    assert archive.flaw(tmp_path, STEP) == "tmd.json differs from what was written"


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_seal_of_another_release_is_whole(change: str, tmp_path: Path) -> None:
    """It may have fields that this one does not know, or lack some with a default."""
    written(tmp_path, Two(1).only("model", "ema", "optimizer"))
    file = tmp_path / name_of(STEP) / archive.SEAL
    seal = json.decode(file.read_bytes())
    if change == "more":
        seal["position"]["later"] = True
    else:
        del seal["position"]["exhausted"]
    seal["digest"] = archive._digest_of(json.encode(seal))
    file.write_bytes(json.encode(seal))

    assert archive.flaw(tmp_path, STEP) == ""


def test_a_seal_without_a_digest_is_of_an_earlier_version(tmp_path: Path) -> None:
    written(tmp_path, Two(1).only("model", "ema", "optimizer"))
    file = tmp_path / name_of(STEP) / archive.SEAL
    seal = json.decode(file.read_bytes())
    del seal["digest"]
    file.write_bytes(json.encode(seal))

    assert archive.flaw(tmp_path, STEP) == ""


def test_two_workers_do_not_join_the_same_parts(tmp_path: Path) -> None:
    """The former worker of rank 0 may still be at it, in a process of its own."""
    parts(tmp_path, Two(1).only("model", "ema", "optimizer"))
    seal = tmp_path / (name_of(STEP) + PARTIAL) / "part-0" / archive.SEAL
    with seal.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            archive.join_parts(tmp_path, STEP, 1)
    archive.join_parts(tmp_path, STEP, 1)

    assert archive.flaw(tmp_path, STEP) == ""


def test_parts_of_two_runs_are_not_joined(tmp_path: Path) -> None:
    """A host of the former run was cut off while it wrote, and writes its part once it is back.
    The seed may be another one since."""
    old = [Stage("a", 1).train(), Stage("b", 2).train()]
    new = [Stage("a", 3).train(), Stage("b", 4).train()]
    former, run = archive.new_run(), archive.new_run()
    part(tmp_path, old[1], 1, 2, former)
    part(tmp_path, new[0], 0, 2, run)
    with pytest.raises(StateMismatch, match="different runs"):
        archive.join_parts(tmp_path, STEP, 2)

    part(tmp_path, new[1], 1, 2, run)
    archive.join_parts(tmp_path, STEP, 2)
    after = fresh("a", "b")
    gone_on(archive.CheckpointReader(tmp_path, STEP), after)

    assert [s.layer(name) for s, name in zip(after, "ab", strict=True)] == [
        s.layer(name) for s, name in zip(new, "ab", strict=True)
    ]


def test_an_unknown_run_is_taken_for_this_one(tmp_path: Path) -> None:
    """A standby does not know it, nor does a worker of tmd 0.1.0."""
    stages = [Stage("a", 1).train(), Stage("b", 2).train()]
    part(tmp_path, stages[0], 0, 2, "")
    part(tmp_path, stages[1], 1, 2, "run")
    part(tmp_path, Stage("b", 2).train(), 1, 2, "")
    archive.join_parts(tmp_path, STEP, 2)

    assert archive.flaw(tmp_path, STEP) == ""


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_state_is_not_converted(tmp_path: Path, kind: torch.dtype) -> None:
    """It would lose bits, or the optimizer would go on with moments of another type."""
    reading = saved(tmp_path, [Stage("a", 1).train()])
    after = fresh("a")
    after[0].model.to(kind)

    name = str(kind).removeprefix("torch.")
    with pytest.raises(StateMismatch, match=rf"is float32 \[.*\] in .*, {name} \[.*\] here"):
        gone_on(reading, after)


def test_a_worker_of_the_former_run_replaces_no_part_of_this_one(tmp_path: Path) -> None:
    former, run = archive.new_run(), archive.new_run()
    part(tmp_path, Stage("a", 3).train(), 0, 1, run)
    with pytest.raises(StateMismatch, match="a later run of the job writes"):
        part(tmp_path, Stage("a", 1).train(), 0, 1, former)
    archive.join_parts(tmp_path, STEP, 1)

    assert archive.CheckpointReader(tmp_path, STEP).seal.size == 1
    assert archive.flaw(tmp_path, STEP) == ""


@pytest.mark.parametrize("later", ["part-1", "part-1.1234.new"])
def test_a_lock_that_a_lost_host_has_left_does_not_count(tmp_path: Path, later: str) -> None:
    """On NFS it may remain until the host is back. The rank's new worker writes its part of a later
    checkpoint."""
    place = tmp_path / (name_of(STEP) + PARTIAL)
    place.mkdir()
    with disk.marked(place / "part-1.1234.writing"):
        before = archive.being_written(tmp_path, STEP, [1, 2])
        (tmp_path / (name_of(STEP + 10) + PARTIAL) / later).mkdir(parents=True)
        after = archive.being_written(tmp_path, STEP, [1, 2])

    assert (before, after) == (True, False)
    assert not archive.being_written(tmp_path, STEP, [1, 2])


class Halting:
    """A value whose writing waits."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE_S)
        return int, (2,)


def test_a_part_is_that_of_one_of_two_workers_that_write_it(tmp_path: Path) -> None:
    """The former worker of a rank was cut off while it wrote, and goes on."""
    stages = [Stage("a", 1).train() for _ in range(2)]
    names = [Names(stage.registry, all_different(1)) for stage in stages]
    former, later = (StagedState(n, 0, STEP, Position(0, STEP), SEED) for n in names)
    halting = later.copies["scheduler", "last_epoch"] = Halting()
    for staged in (former, later):
        staged.finish()
    later.settled.set()
    with ThreadPoolExecutor() as threads:
        one = threads.submit(archive.write_part, tmp_path, former, 1)
        wait_for(lambda: any(tmp_path.glob(f"*/part-0.*/{archive.SEAL}")))
        other = threads.submit(archive.write_part, tmp_path, later, 1)
        assert halting.begun.wait(PATIENCE_S)
        former.settled.set()
        error = one.exception(PATIENCE_S)
        halting.goes_on.set()
        other.result(PATIENCE_S)
    archive.join_parts(tmp_path, STEP, 1)

    assert isinstance(error, FileNotFoundError)
    assert archive.flaw(tmp_path, STEP) == ""
    found = sorted(each.name for each in (tmp_path / name_of(STEP)).iterdir())
    assert found == [".metadata", "part-0", "tmd.json"]


def test_a_part_whose_seal_lacks_a_file_is_not_joined(tmp_path: Path) -> None:
    """Somebody has removed it before the part was sealed."""
    parts(tmp_path, Two(1).only("model", "ema", "optimizer"))
    file = tmp_path / (name_of(STEP) + PARTIAL) / "part-0" / archive.SEAL
    seal = json.decode(file.read_bytes())
    del seal["files"]["__0_0.distcp"]
    file.write_bytes(json.encode(seal))

    with pytest.raises(StateMismatch, match=r"part-0 lacks __0_0.distcp"):
        archive.join_parts(tmp_path, STEP, 1)


@pytest.mark.parametrize("left", ["part-0.1234.new", "part-0.1234.writing"])
def test_nothing_of_a_killed_worker_is_in_a_checkpoint(tmp_path: Path, left: str) -> None:
    parts(tmp_path, Two(1).only("model", "ema", "optimizer"))
    place = tmp_path / (name_of(STEP) + PARTIAL)
    (place / left).touch() if left.endswith("writing") else (place / left).mkdir()
    archive.join_parts(tmp_path, STEP, 1)

    found = sorted(each.name for each in (tmp_path / name_of(STEP)).iterdir())
    assert found == [".metadata", "part-0", "tmd.json"]


def test_two_workers_of_a_rank_may_write_at_once(tmp_path: Path) -> None:
    """The one before may be slow, and ends first or last."""
    file = tmp_path / "part-1.writing"
    with disk.marked(file), disk.marked(file):
        assert disk.is_locked(file)
