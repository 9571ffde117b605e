"""What the strategy refuses, and how a Lightning job goes on from a checkpoint."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, TensorDataset

from tests.e2e.frameworks import need
from tests.integrations.generators import generator_states
from tests.trainer.standalone import Voting
from tmd.trainer import Session
from tmd.trainer.session.hooks import Interrupted

if TYPE_CHECKING:
    import lightning.pytorch as pl

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one, and the environment as it was."""
    need("lightning")
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class Sum:
    """What a script adds up from step to step."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def small(
    *, automatic: bool = True, fails_at: int = -1, dropout: float = 0.2, **logged: Any
) -> pl.LightningModule:
    """A module that logs its loss with the arguments ``logged``, and may fail at a step."""
    import lightning.pytorch as pl

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout))
            self.automatic_optimization = automatic
            self.losses: list[float] = []
            self.validated = 0
            self.sum = Sum()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if self.global_step == fails_at:
                raise InterruptedError("as if its machine had failed")
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            self.sum.value += loss.item()
            self.log("loss", loss, **logged)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.validated += 1
            self.log("val_loss", self.net(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    return Small()


def batches(count: int) -> DataLoader[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(count)
    return DataLoader(TensorDataset(torch.randn(2 * count, 4, generator=draw)), batch_size=2)


def fit(
    module: pl.LightningModule,
    loader: Any = None,
    validated: Any = None,
    *,
    checkpoints: dict[str, Any] | None = None,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> pl.Trainer:
    """Train on six batches for each epoch, one epoch by default."""
    import lightning.pytorch as pl

    from tmd.integrations.lightning import TmdStrategy

    quiet = {
        "logger": False,
        "enable_checkpointing": any("Checkpoint" in str(c) for c in arguments.get("callbacks", [])),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    torch.manual_seed(0)
    chosen = {"max_epochs": 1, **quiet, **arguments}
    if "strategy" not in chosen:
        chosen["strategy"] = TmdStrategy(lambda module: {"sum": module.sum}, checkpoints)
    trainer = pl.Trainer(accelerator="cpu", devices=1, **chosen)
    trainer.fit(
        module,
        batches(6) if loader is None else loader,
        validated or batches(2),
        ckpt_path=ckpt_path,
        weights_only=True,
    )
    return trainer


def callbacks(name: str, **arguments: Any) -> Callable[[], dict[str, Any]]:
    """Makes one callback only when the test runs, since Lightning may be missing."""

    def make() -> dict[str, Any]:
        import lightning.pytorch.callbacks as known

        return {"callbacks": [getattr(known, name)(**arguments)]}

    return make


def across_epochs(interval: int) -> dict[str, Any]:
    """Validation after each ``interval`` batches, of which four are one step."""
    return {
        "check_val_every_n_epoch": None,
        "val_check_interval": interval,
        "accumulate_grad_batches": 4,
        "num_sanity_val_steps": 0,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (callbacks("StochasticWeightAveraging", swa_lrs=0.1), "StochasticWeightAveraging"),
        (callbacks("GradientAccumulationScheduler", scheduling={0: 2}), "one number"),
        (callbacks("ModelCheckpoint", save_last="link"), "save_last='link'"),
        (callbacks("ModelCheckpoint", save_on_exception=True), "save_on_exception=True"),
        (lambda: {"max_time": "00:00:01:00"}, "Timer"),
        (lambda: {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        (lambda: {"val_check_interval": "00:00:00:01"}, "as a time"),
        (callbacks("LearningRateFinder"), "LearningRateFinder"),
        (callbacks("ModelPruning", pruning_fn="l1_unstructured", amount=0.5), "ModelPruning"),
        (callbacks("SpikeDetection"), "SpikeDetection"),
        (callbacks("ThroughputMonitor", batch_size_fn=len), "ThroughputMonitor"),
        (lambda: {"val_check_interval": 3, "accumulate_grad_batches": 2}, "batch 3 of epoch 1"),
        (lambda: {**across_epochs(8), "max_epochs": 2}, "batch 2 of epoch 2"),
    ],
)
def test_what_cannot_move_is_refused_by_name(
    make: Callable[[], dict[str, Any]], message: str
) -> None:
    """Before the first step."""
    module = small()
    with pytest.raises(Exception, match=f"TmdStrategy does not support.*{message}"):
        fit(module, **make())
    assert module.losses == []


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(Exception, match="automatic_optimization=False"):
        fit(small(automatic=False))


def test_a_mean_over_an_epoch_is_refused() -> None:
    """In the first step: a lost rank would take its sum along."""
    with pytest.raises(Exception, match=r"self.log\('loss', on_epoch=True\)"):
        fit(small(on_epoch=True))


def test_a_monitored_value_of_training_moves_with_a_rank() -> None:
    """A worker that takes a rank between a step and its checkpoint decides on it."""
    stop = callbacks("EarlyStopping", monitor="loss", patience=100)()
    module = small(sync_dist=True)
    progress = fit(module, **stop).fit_loop.progress

    (kept,) = [v for k, v in progress.state_dict()["metrics"].items() if k == "loss"]
    assert kept["tensor"] == module.losses[-1]


def test_a_monitored_value_of_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl

    stop = callbacks("EarlyStopping", monitor="loss", patience=100)()
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(Exception, match="monitor='loss': log it with sync_dist=True"):
        fit(small(), limit_val_batches=0, **stop)


def test_a_value_in_the_name_of_a_checkpoint_moves_with_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker that takes rank 0 before it saves would write a file of another name."""
    import lightning.pytorch as pl

    saves = callbacks("ModelCheckpoint", dirpath=tmp_path, filename="{epoch}-{loss:.2f}")
    module = small(sync_dist=True)
    progress = fit(module, **saves()).fit_loop.progress
    (file,) = tmp_path.iterdir()
    dist.destroy_process_group()
    monkeypatch.setattr(pl.Trainer, "world_size", 2)

    assert progress.state_dict()["metrics"]["loss"]["tensor"] == module.losses[-1]
    assert file.name == f"epoch=0-loss={module.losses[-1]:.2f}.ckpt"
    named = callbacks("ModelCheckpoint", dirpath=tmp_path / "other", filename="{epoch}-{step}")
    fit(small(), limit_val_batches=0, **named())
    dist.destroy_process_group()
    with pytest.raises(Exception, match=r"a file name with {loss}: log it with sync_dist=True"):
        fit(small(), limit_val_batches=0, **saves())


def test_a_copy_of_a_checkpoint_has_any_kind_of_tensor() -> None:
    from tmd.integrations.lightning.strategy import _copied

    whole = torch.tensor([1 + 2j])
    copied = _copied({"x": whole, "y": whole.conj(), "z": torch.eye(2).to_sparse()})

    assert copied["x"].item() == 1 + 2j
    assert copied["y"].item() == 1 - 2j
    assert torch.equal(copied["z"].to_dense(), torch.eye(2))


@dataclass(frozen=True)
class Frozen:
    """A configuration."""

    layers: int


def test_a_checkpoint_that_a_hook_saves_is_of_that_moment(tmp_path: Path) -> None:
    """It is written after the step, which changes the parameters, or after the hook, which may."""
    from lightning.pytorch.callbacks import Callback

    seen: list[dict[str, Tensor]] = []

    class Saves(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append({name: t.clone() for name, t in module.state_dict().items()})
            trainer.save_checkpoint(tmp_path / f"{len(seen)}.ckpt")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            """With other weights, as those of an average."""
            kept = [p.detach().clone() for p in module.parameters()]
            for p in module.parameters():
                p.data.fill_(7.0)
            self.on_train_batch_start(trainer, module)
            for p, before in zip(module.parameters(), kept, strict=True):
                p.data.copy_(before)

    module = small()
    module.save_hyperparameters({"frozen": Frozen(3), "range": range(3)})
    module.tied = module.net[0].weight
    fit(module, None, batches(2), callbacks=[Saves()], num_sanity_val_steps=0)
    whole = [
        torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in range(1, len(seen) + 1)
    ]
    files = [each["state_dict"] for each in whole]

    assert len(seen) == 7
    assert all(hasattr(file, "_metadata") for file in files)
    assert all(file["tied"].data_ptr() == file["net.0.weight"].data_ptr() for file in files)
    assert whole[0]["hyper_parameters"] == {"frozen": Frozen(3), "range": range(3)}
    assert all(
        torch.equal(file[name], before[name])
        for file, before in zip(files, seen, strict=True)
        for name in before
    )
    assert not torch.equal(seen[0]["net.0.weight"], seen[-1]["net.0.weight"])


def test_a_callback_whose_state_was_empty_is_empty_again_after_a_step_that_broke(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from lightning.pytorch.callbacks import Callback

    class Counts(Callback):
        def __init__(self) -> None:
            self.counts: dict[str, int] = {}

        def state_dict(self) -> dict[str, int]:
            return dict(self.counts)

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            self.counts = dict(state_dict)

    class Best(Callback):
        """Lightning never gives it an empty state."""

        best: int | None = None

        def state_dict(self) -> dict[str, int]:
            return {} if self.best is None else {"best": self.best}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            self.best = state_dict["best"]

    counts, best = Counts(), Best()
    progress = fit(small(), callbacks=[counts, best, Callback()]).fit_loop.progress
    before = progress.state_dict()
    progress.load_state_dict(before)
    counts.counts["steps"] = best.best = 1
    progress.load_state_dict(before)

    assert list(before["callbacks"].values()) == [{}, {}]
    assert counts.counts == {}
    assert caplog.text.count("Best.load_state_dict() does not take an empty state") == 1


def scored(*, loaders: bool, **logged: Any) -> pl.LightningModule:
    """A module that logs ``score`` in validation with the arguments ``logged``; if ``loaders``, it
    has several validation loaders."""
    module = small()

    def one(batch: list[Tensor], batch_idx: int) -> None:
        module.log("score", batch[0].mean(), **logged)

    def several(batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        one(batch, batch_idx)

    module.validation_step = several if loaders else one
    return module


FORKED = {"on_step": True, "on_epoch": True}
"""Lightning then adds ``_step`` and ``_epoch`` to the name."""


@pytest.mark.parametrize(
    ("monitor", "loaders", "logged"),
    [
        ("score", False, {}),
        ("score/dataloader_idx_0", True, {}),
        ("score_epoch", False, FORKED),
        ("score_epoch/dataloader_idx_1", True, FORKED),
    ],
)
def test_a_monitored_value_of_one_rank_is_refused_by_each_of_its_names(
    monitor: str, loaders: bool, logged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a value of its own, each rank would stop at another epoch."""
    import lightning.pytorch as pl

    validated = [batches(2), batches(2)] if loaders else batches(2)
    stop = callbacks("EarlyStopping", monitor=monitor, patience=100)()
    fit(scored(loaders=loaders, sync_dist=True, **logged), None, validated, **stop)
    dist.destroy_process_group()
    module = scored(loaders=loaders, **logged)
    monkeypatch.setattr(pl.Trainer, "world_size", 2)

    with pytest.raises(Exception, match=f"monitor='{monitor}': log it with sync_dist=True"):
        fit(module, None, validated, use_distributed_sampler=False, **stop)


def test_the_values_of_each_validation_loader_move_with_a_rank() -> None:
    """Also those that nothing monitors: a hook may read them later."""
    module = scored(loaders=True, **FORKED)
    trainer = fit(module, None, [batches(2), batches(3)])
    kept = trainer.fit_loop.progress.state_dict()["metrics"]

    found = trainer._logger_connector._callback_metrics
    names = {key for key in found if key.startswith("score")}
    assert len(names) == 4
    assert {key: kept[key]["tensor"] for key in names} == {n: float(found[n]) for n in names}


@pytest.mark.parametrize(("workers", "seen"), [(1, 8), (2, 8), (8, 2), (3, 8)])
def test_workers_that_would_share_a_gpu_are_refused(workers: int, seen: int) -> None:
    """Unless the host has no other ones, or shows each worker its own."""
    from tmd.integrations.lightning.refused import refuse_shared_devices

    refuse_shared_devices([torch.device("cpu")], workers, 0)
    two = [torch.device("cuda", number) for number in range(2)]
    context = pytest.raises(Exception, match=r"2 of 8 GPUs for the 3 workers of a host: give dev")
    with context if workers == 3 else nullcontext():
        refuse_shared_devices(two, workers, seen)


@pytest.mark.parametrize("ends", [True, False], ids=["to its end", "by an error"])
def test_a_validation_that_is_run_again_counts_once_in_a_metric(ends: bool) -> None:
    """It may come to its end with other ranks' values missing, and only then lose its vote."""
    from torchmetrics import CatMetric, MaxMetric, MeanMetric, MinMaxMetric

    from tmd.integrations.lightning import TmdStrategy

    module, found = small(), []
    strategy, hooks = TmdStrategy(lambda module: {"sum": module.sum}), Voting()
    hooks.lost = {6} if ends else set()  # after six steps
    strategy.session = Session(hooks)
    metrics: list[Any] = [MeanMetric(), CatMetric(), MaxMetric(), MinMaxMetric(MeanMetric())]
    module.metrics = nn.ModuleList(metrics)
    weight = torch.ones((), requires_grad=True)
    for each in metrics:
        each(weight * 2.0)  # as in a training step, with a graph

    def validate() -> None:
        found.append(0)
        for each in metrics:
            each.update(9.0 if len(found) == 1 else 3.0)
            each.compute()
        if len(found) == 1 and not ends:
            raise Interrupted

    module.on_validation_epoch_end = validate
    trainer = fit(module, strategy=strategy, num_sanity_val_steps=0)

    assert len(found) == 2
    assert trainer.fit_loop.progress.runs == 1
    assert [each.update_count for each in metrics[:3]] == [2, 2, 2]
    mean, every, most, extremes = (each.compute() for each in metrics)
    assert (float(mean), every.tolist(), float(most)) == (2.5, [2.0, 3.0], 3.0)
    assert (float(extremes["min"]), float(extremes["max"])) == (2.0, 2.5)


def test_a_rank_whose_step_has_failed_takes_part_in_nothing_more() -> None:
    """A script may catch the error, and call a barrier before it ends."""
    from tmd.integrations.lightning import TmdStrategy

    strategy, hooks = TmdStrategy(lambda module: {"sum": module.sum}), Voting()
    strategy.session = Session(hooks)
    with pytest.raises(InterruptedError):
        fit(small(fails_at=2), strategy=strategy, num_sanity_val_steps=0)

    assert hooks.health.failures == 1
    assert "after an error in a training step" in strategy.session.why_not_done


def test_the_rest_of_an_epoch_that_a_hook_skips_is_refused() -> None:
    module = small()
    module.on_train_batch_start = lambda batch, index: -1
    with pytest.raises(Exception, match="on_train_batch_start that returns -1"):
        fit(module)


def test_a_logger_has_its_own_type_in_a_step(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    module, seen = small(), []
    module.on_after_backward = lambda: seen.append(isinstance(module.logger, CSVLogger))
    fit(module, logger=CSVLogger(tmp_path), limit_train_batches=1)

    assert seen == [True]


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_batch_has_the_structure_in_which_the_script_returns_its_loader(kind: str) -> None:
    """As in Lightning without tmd."""

    def seen(strategy: dict[str, Any]) -> Any:
        loader = batches(6)
        given: Any = {"list": [loader], "dict": {"text": loader}}[kind]
        module, found = small(dropout=0.0), []
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            found.append(batch)
            return step(batch[0] if kind == "list" else batch["text"], batch_idx)

        module.training_step = training_step
        fit(module, given, **strategy)
        return found

    ours, theirs = seen({}), seen({"strategy": "auto"})
    assert len(ours) == 6
    assert tree_structure(ours) == tree_structure(theirs)


class Means(NamedTuple):
    """State of a callback."""

    values: Tensor
    number: int


def test_the_state_of_a_callback_comes_back_as_it_was() -> None:
    from tmd.integrations.lightning.progress import _plain, _restored

    state = {"means": Means(torch.ones(0, 3, dtype=torch.float64), 2), "rest": [(1, "a")]}
    kept = json.loads(json.dumps(_plain({"rest": state["rest"]})))
    restored = _restored(_plain(state))

    assert restored["means"].values.shape == (0, 3)
    assert restored["means"].values.dtype is torch.float64
    assert (restored["means"].number, restored["rest"]) == (2, [(1, "a")])
    assert kept == {"rest": [[1, "a"]]}


def test_a_large_tensor_in_the_state_of_a_callback_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It becomes a list of numbers in each step, unless the session is to keep the callback."""
    import lightning.pytorch as pl

    from tmd.integrations.lightning import TmdStrategy

    class Average(pl.Callback):
        def __init__(self) -> None:
            self.weights = torch.zeros(100_000)

        def state_dict(self) -> dict[str, Any]:
            return {"weights": self.weights}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.weights = state["weights"]

    average = Average()
    fit(small(), callbacks=[average])
    (warning,) = [m for m in caplog.messages if "a tensor of 100000 elements" in m]
    assert "Average" in warning
    dist.destroy_process_group()
    caplog.clear()
    strategy = TmdStrategy(lambda module: {"sum": module.sum, "average": average})
    progress = fit(small(), callbacks=[average], strategy=strategy).fit_loop.progress

    assert not any("elements" in m for m in caplog.messages)
    assert progress.state_dict()["callbacks"].keys().isdisjoint([average.state_key])


def test_a_logger_that_fails_on_the_next_worker_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends no worker, and the step draws what it would draw on another one."""
    import numpy as np
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.loggers.logger import DummyLogger

    class Broken(Logger):
        name = version = "broken"

        def log_hyperparams(self, *args: Any, **named: Any) -> None:
            """It makes an id for its run."""
            random.random(), np.random.rand(), torch.rand(())
            raise OSError("no network")

        def log_metrics(self, *args: Any, **named: Any) -> None:
            raise OSError("no network")

        def save(self) -> None:
            raise OSError("no network")

    module = small()
    module.save_hyperparameters({"width": 4})
    trainer = fit(module)
    strategy: Any = trainer.strategy
    trainer.loggers = [Broken(), CSVLogger(tmp_path)]
    with strategy.held() as effects:
        for logger in trainer.loggers:
            logger.log_metrics({"loss": 1.0}, 1)

    before = generator_states()
    strategy._writes = False  # as on a worker that takes rank 0 in this step
    strategy.set_world_ranks()
    after = generator_states()
    for effect in effects:
        effect()
    opened = [type(each) for each in trainer.loggers]
    lines = trainer.loggers[1]
    trainer.loggers = [Broken(), lines]
    strategy.leave()

    assert before == after
    assert opened == [DummyLogger, CSVLogger]
    assert "Broken cannot be opened: nothing is logged to it" in caplog.text
    assert "Broken has lost what it had not written" in caplog.text
    (file,) = tmp_path.glob("*/*/metrics.csv")
    assert "1.0" in file.read_text()


def test_a_loader_without_a_length_is_refused() -> None:
    with pytest.raises(Exception, match="without a length"):
        fit(small(), iter([[torch.ones(2, 4)]]))


def test_a_loader_without_batches_trains_nothing() -> None:
    """As without tmd."""
    empty = DataLoader(TensorDataset(torch.ones(0, 4)))
    assert fit(small(), [empty]).global_step == 0


HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)


def followed(folder: Path, **arguments: Any) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Each hook with the counters that it sees, each logged line, and the checkpoints."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    seen: list[tuple[Any, ...]] = []

    def noted(name: str) -> Callable[..., None]:
        def note(_: object, trainer: pl.Trainer, *args: object) -> None:
            loss = trainer.callback_metrics.get("loss")
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            seen.append((name, trainer.current_epoch, trainer.global_step, loss, lr))

        return note

    noting = type("Noting", (pl.Callback,), {name: noted(name) for name in HOOKS})()
    saved = [
        ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1),
        ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True),
    ]
    module = small(dropout=0.0)
    fit(
        module,
        max_epochs=3,
        accumulate_grad_batches=4,
        gradient_clip_val=0.01,
        log_every_n_steps=1,
        callbacks=[noting, *saved],
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        **arguments,
    )
    lines = (folder / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.ckpt"))
    return seen, [*lines, *files, *(loss.hex() for loss in module.losses)]


@pytest.mark.parametrize("interval", [1.0, 4])
def test_lightning_does_what_it_does_without_tmd(tmp_path: Path, interval: float) -> None:
    """The same hooks in the same order, counters, lines, checkpoints and losses."""
    theirs = followed(tmp_path / "plain", val_check_interval=interval, strategy="ddp")
    dist.destroy_process_group()
    ours = followed(tmp_path / "tmd", val_check_interval=interval)

    assert ours[1] == theirs[1]
    assert ours[0] == theirs[0]


def test_two_callbacks_that_save_in_one_validation_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    """The second one finds the first one's name taken, though nothing is written yet."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saved = [ModelCheckpoint(tmp_path, monitor="val_loss", mode=mode) for mode in ("min", "max")]
    fit(small(), max_epochs=3, callbacks=saved)

    paths = {each.best_model_path for each in saved}
    assert len(paths) == 2
    assert {str(path) for path in tmp_path.iterdir()} == paths


def test_an_interval_of_validation_and_a_limit_are_kept() -> None:
    """Seven steps of one batch: validation after each third batch of an epoch of five."""
    module = small()
    trainer = fit(
        module,
        max_epochs=-1,
        max_steps=7,
        limit_train_batches=5,
        val_check_interval=3,
        num_sanity_val_steps=0,
    )

    assert len(module.losses) == trainer.global_step == 7
    assert module.validated == 2
    assert trainer.current_epoch == 2


def test_an_interval_that_ends_with_an_epoch_is_kept() -> None:
    """Six batches are no multiple of a step, but validation comes after each second epoch."""
    module = small()
    fit(module, max_epochs=4, **across_epochs(12))

    assert module.validated == 2 * 2


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_epochs": 9, "max_steps": 2}])
def test_an_interval_that_fits_all_epochs_that_come_is_kept(limit: dict[str, int]) -> None:
    """In a second epoch of six batches validation would come after the second one."""
    module = small()
    fit(module, **{**across_epochs(4), **limit})

    assert len(module.losses) == 6


def test_a_stop_within_a_step_takes_effect_after_it() -> None:
    """The step is finished, and the model is validated once."""
    import lightning.pytorch as pl

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
            trainer.should_stop = True

    module = small()
    trainer = fit(module, callbacks=[Stops()], accumulate_grad_batches=2, num_sanity_val_steps=0)

    assert (len(module.losses), trainer.global_step) == (2, 1)
    assert module.validated == 2


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_a_hook_may_ask_for_the_number_of_steps(hook: str) -> None:
    """Lightning then sets up the data early. The steps still take the batches of the session."""
    plain, asking = small(), small()
    call, answers = getattr(asking, hook), []

    def ask(**arguments: Any) -> Any:
        answers.append(asking.trainer.estimated_stepping_batches)
        return call(**arguments)

    setattr(asking, hook, ask)
    fit(plain, max_epochs=2)
    fit(asking, max_epochs=2)

    assert answers == [12]
    assert asking.losses == plain.losses


def test_what_cannot_run_is_refused_after_a_hook_has_asked_for_the_number_of_steps() -> None:
    module = small()
    make = module.configure_optimizers
    module.configure_optimizers = lambda: (module.trainer.estimated_stepping_batches, make())[1]

    with pytest.raises(Exception, match="batch 3 of epoch 1"):
        fit(module, val_check_interval=3, accumulate_grad_batches=2)


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", None])
def test_a_data_set_knows_the_epoch_of_each_batch(
    strategy: str | None, hook: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """From the first one on, as without tmd. The hook is named, since a joiner does not run it.
    Without one, nobody sets the epoch."""

    class WithEpochs(TensorDataset):
        epoch, seen = 0, list[int]()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            self.seen.append(self.epoch)
            return super().__getitem__(index)

    data, module = WithEpochs(torch.ones(3, 4)), small()
    if hook:
        module.on_train_epoch_start = lambda: data.set_epoch(module.current_epoch)
    chosen: dict[str, Any] = {"strategy": strategy} if strategy else {}
    fit(module, DataLoader(data), max_epochs=3, **chosen)

    assert data.seen == ([0, 0, 0, 1, 1, 1, 2, 2, 2] if hook else [0] * 9)
    warned = [each for each in caplog.messages if "on_train_epoch_start of Small" in each]
    assert len(warned) == (hook and strategy is None)


def test_loader_processes_are_seeded_by_the_rank_held_now() -> None:
    """``seed_everything(workers=True)`` binds the rank when the loader is built."""
    from functools import partial

    from lightning.fabric.utilities.seed import pl_worker_init_function

    loaders = batches(6), batches(2)
    for loader in loaders:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=5)
    trainer = fit(small(), *loaders)

    assert trainer.train_dataloader.worker_init_fn.keywords == {"rank": 0}
    assert trainer.val_dataloaders.worker_init_fn.keywords == {"rank": 0}


def test_a_checkpoint_of_the_end_of_an_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at_end would end each epoch"):
        fit(small(), checkpoints={"path": tmp_path, "every": 4, "at_end": True})


def test_early_stopping_within_an_epoch_ends_it() -> None:
    """The end of the epoch comes once, with the validation that stops training."""
    module = small()
    stop = callbacks("EarlyStopping", monitor="val_loss", stopping_threshold=1e9)()
    trainer = fit(module, max_epochs=5, val_check_interval=2, **stop)

    assert len(module.losses) == 2
    assert trainer.current_epoch == 1


def test_a_job_goes_on_from_a_checkpoint_of_the_session(tmp_path: Path) -> None:
    """In the middle of the second epoch, with the numbers of a run that never stopped: also
    those that only the script knows."""
    whole, first, second = small(), small(fails_at=9), small()
    checkpoints = {"path": tmp_path / "state", "every": 4}
    fit(whole, max_epochs=3)
    with pytest.raises(InterruptedError):
        fit(first, max_epochs=3, checkpoints=checkpoints)
    fit(second, max_epochs=3, checkpoints=checkpoints)

    assert first.losses == whole.losses[:9]
    assert second.losses[-9:] == whole.losses[-9:]
    assert second.sum.value == whole.sum.value


@pytest.mark.parametrize(("late", "left"), [(False, 10), (True, 16)], ids=["first", "second"])
def test_epochs_keep_their_numbers_whichever_start_had_a_checkpoint_of_lightning(
    late: bool, left: int, tmp_path: Path
) -> None:
    """The order of the data follows from them. The checkpoint of the session goes first, also if
    ``ckpt_path`` was given only when the job began, or only when it went on, as with "last"."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DistributedSampler

    def shuffled() -> Any:
        data = batches(6).dataset
        return DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0, seed=3))

    ended = ModelCheckpoint(tmp_path, "{epoch}", save_on_train_epoch_end=True)
    fit(small(), shuffled(), callbacks=[ended])
    saved, state = tmp_path / "epoch=0.ckpt", {"path": tmp_path / "state", "every": 10}
    begins, goes_on = (None, saved) if late else (saved, None)
    whole, first, second = small(), small(fails_at=15), small()
    fit(whole, shuffled(), max_epochs=4, ckpt_path=begins)
    with pytest.raises(InterruptedError):
        fit(first, shuffled(), max_epochs=4, checkpoints=state, ckpt_path=begins)
    wait_for(tmp_path / "state" / "step-00000010")
    fit(second, shuffled(), max_epochs=4, checkpoints=state, ckpt_path=goes_on)

    assert second.losses == whole.losses[-left:]
    assert second.sum.value == whole.sum.value


def test_a_state_of_another_epoch_than_the_data_is_refused() -> None:
    """As from a session checkpoint of 0.1.0, if that job began with a checkpoint of Lightning."""
    module = small()
    module.on_train_start = lambda: setattr(
        module.trainer.fit_loop.epoch_progress.current, "processed", 1
    )

    with pytest.raises(RuntimeError, match="the state is of epoch 1, and the next batches are of"):
        fit(module, max_epochs=2)


def wait_for(checkpoint: Path) -> None:
    """It is written beside training. At its end a process waits for it."""
    for _ in range(1000):
        if checkpoint.exists():
            return
        time.sleep(0.01)
    raise TimeoutError(checkpoint)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "raised", "every"),
    [({"max_epochs": 2}, {"max_epochs": 3}, 15), ({"max_steps": 6}, {"max_steps": 9}, 7)],
    ids=["epochs", "steps"],
)
def test_a_job_with_a_raised_limit_goes_on_from_the_end_of_the_former_one(
    limit: dict[str, int], raised: dict[str, int], every: int, tmp_path: Path
) -> None:
    """With the numbers of a job that never ended, if that end was the end of an epoch."""
    whole, first, second = small(), small(), small()
    checkpoints = {"path": tmp_path / "state", "every": every}
    arguments: list[dict[str, Any]] = [{"max_epochs": -1, **each} for each in (limit, raised)]
    fit(whole, **arguments[1])
    fit(first, **arguments[0], checkpoints=checkpoints)
    wait_for(tmp_path / "state" / f"step-{every:08}")
    trainer = fit(second, **arguments[1], checkpoints=checkpoints)

    assert first.losses + second.losses == whole.losses
    assert trainer.global_step == len(whole.losses)
    assert second.sum.value == whole.sum.value


def test_a_limit_that_ended_a_job_within_an_epoch_is_not_raised(tmp_path: Path) -> None:
    """The job had dropped the rest of the epoch, so that its numbers would be those of no job."""
    checkpoints = {"path": tmp_path / "state", "every": 5}
    fit(small(), max_epochs=-1, max_steps=4, checkpoints=checkpoints)
    wait_for(tmp_path / "state" / "step-00000005")

    with pytest.raises(
        Exception, match="at the end of a job of 4 steps, in the middle of an epoch"
    ):
        fit(small(), max_epochs=-1, max_steps=9, checkpoints=checkpoints)


def test_a_checkpoint_of_lightning_continues_at_the_next_epoch(tmp_path: Path) -> None:
    """One that was saved within an epoch is refused."""
    import lightning.pytorch.callbacks as known

    saved = known.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    ended = known.ModelCheckpoint(tmp_path, "{epoch}", save_on_train_epoch_end=True)
    fit(small(), callbacks=[saved, ended])
    again = small()
    trainer = fit(again, max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")

    assert trainer.global_step == 12
    assert len(again.losses) == 6
    with pytest.raises(Exception, match="saved within an epoch"):
        fit(small(), max_epochs=2, ckpt_path=tmp_path / "step=4.ckpt")
