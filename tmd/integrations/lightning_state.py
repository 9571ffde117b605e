"""What Lightning keeps between two steps, and what of Lightning cannot run on a session."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

REFUSED = {
    BaseFinetuning: "it changes the parameter groups while training runs",
    GradientAccumulationScheduler: "give Trainer(accumulate_grad_batches=...) one number",
    StochasticWeightAveraging: "it replaces the weights outside of a step",
    Timer: "each rank has a clock of its own: give max_epochs or max_steps",
    WeightAveraging: "its averaged weights are not registered",
}
"""Callbacks that a repeated step or another rank's state would make wrong, and why."""
UNSAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ``ModelCheckpoint`` that its own state lacks."""


class Progress:
    """Counters of the loops, states of the callbacks and validated metrics; moves with a rank."""

    def __init__(self, trainer: Trainer, loop: _FitLoop) -> None:
        self._trainer, self._loop = trainer, loop
        self.pending = False
        """Whether the latest step awaits what is done between two steps."""
        self.last = False
        """Whether it is the last one of its epoch."""
        self._metrics: dict[str, Tensor] = {}

    def keep_metrics(self) -> None:
        """Keep what validation has found, which callbacks may use until the next validation."""
        found = self._trainer._logger_connector._callback_metrics
        results = self._loop.epoch_loop.val_loop._results.values()
        names = [metric.meta.name for metric in results]
        self._metrics = {name: found[name] for name in names if name in found}
        _refuse_unreduced(self._trainer, results)

    def state_dict(self) -> dict[str, Any]:
        loops = self._loop.state_dict()
        loops["state_dict"] = {}  # of loaders, whose position is the session's
        callbacks = {c.state_key: _state_of(c) for c in self._trainer.callbacks}
        return {
            "loops": loops,
            "callbacks": _plain({k: v for k, v in callbacks.items() if v}),
            "metrics": _plain(self._metrics),
            "pending": self.pending,
            "last": self.last,
            "should_stop": self._trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _load(self._loop, state["loops"])
        known = {c.state_key: c for c in self._trainer.callbacks}
        for key, value in _restored(state["callbacks"]).items():
            if isinstance(known[key], ModelCheckpoint):
                vars(known[key]).update(value)  # its own method keeps its folder, not the rank's
            else:
                known[key].load_state_dict(value)
        self._metrics = _restored(state["metrics"])
        self._trainer._logger_connector._callback_metrics.update(self._metrics)
        self.pending, self.last = state["pending"], state["last"]
        self._trainer.should_stop = state["should_stop"]


def refuse(trainer: Trainer) -> None:
    """Refuse by name what would train wrongly. Raises MisconfigurationException."""
    reason = ""
    for callback in trainer.callbacks:
        for kind, why in REFUSED.items():
            if isinstance(callback, kind):
                reason = f"{type(callback).__name__}: {why}"
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            reason = "ModelCheckpoint(train_time_interval=...): use every_n_train_steps"
    if not trainer.lightning_module.automatic_optimization:
        reason = "automatic_optimization=False: let Lightning call the optimizer"
    elif trainer.reload_dataloaders_every_n_epochs:
        reason = "reload_dataloaders_every_n_epochs: a rank that moves could not follow"
    elif trainer._val_check_time_interval is not None:
        reason = "val_check_interval as a time: give it as a number"
    _raise(reason)


def refuse_loggers(trainer: Trainer) -> None:
    """Refuse a logger that deletes what it finds. Raises MisconfigurationException."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._version is not None:
            _raise(
                "CSVLogger(version=...): a worker that takes rank 0 would delete the lines of the "
                "former one: let Lightning number the versions"
            )


def refuse_loops(loop: _FitLoop, fetcher: _DataFetcher) -> None:
    """Refuse loaders and intervals that do not fit. Raises MisconfigurationException."""
    trainer = loop.trainer
    assert loop._combined_loader is not None
    interval = trainer.val_check_batch
    steps = trainer.accumulate_grad_batches
    reason = ""
    if len(loop._combined_loader.flattened) != 1:
        reason = "several training loaders: combine them into one data set"
    elif isinstance(fetcher, _DataLoaderIterDataFetcher):
        reason = "training_step(dataloader_iter): take a batch"
    elif loop.max_batches == float("inf"):
        reason = "a training loader without a length: give it __len__"
    elif trainer.enable_validation and interval % steps and interval != loop.max_batches:
        reason = f"val_check_interval of {interval} batches: {steps} batches are one step"
    _raise(reason)


def refuse_resumed(loop: _FitLoop) -> None:
    """Refuse to begin within an epoch. Raises MisconfigurationException."""
    counters = loop.epoch_progress.current
    if loop.is_resuming and counters.started != counters.processed:
        _raise(
            "ckpt_path of a checkpoint that was saved within an epoch: give TmdStrategy("
            "checkpoints=...), or save with ModelCheckpoint(save_on_train_epoch_end=True)"
        )


def refuse_logged(loop: _TrainingEpochLoop) -> None:
    """Refuse sums over an epoch, which a lost rank takes along. Raises."""
    for metric in loop._results.values():
        if metric.meta.on_epoch and not metric.has_reset:
            _raise(f"self.log({metric.meta.name!r}, on_epoch=True) in training: log each step")


def _refuse_unreduced(trainer: Trainer, results: Any) -> None:
    """Refuse a decision on a value that each rank has for itself."""
    monitors = {getattr(c, "monitor", None) for c in trainer.callbacks}
    monitors |= {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}
    for metric in results:
        alone = metric.is_tensor and not metric.meta.sync.should and trainer.world_size > 1
        if alone and metric.meta.name in monitors:
            _raise(f"monitor={metric.meta.name!r}: log it with sync_dist=True")


def _raise(reason: str) -> None:
    if reason:
        raise MisconfigurationException(f"TmdStrategy does not support {reason}")


def _state_of(callback: Any) -> dict[str, Any]:
    state = dict(callback.state_dict())
    if isinstance(callback, ModelCheckpoint):
        state |= {name: getattr(callback, name) for name in UNSAVED if hasattr(callback, name)}
    return state


def _load(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Set the counters. ``load_state_dict`` would also mark the loops as restarting."""
    loop._load_from_state_dict(state, prefix)
    for name, child in vars(loop).items():
        if isinstance(child, _Loop):
            _load(child, state, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    """``value`` with tensors as plain values: their number may change from step to step."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.detach().cpu().tolist(), "dtype": dtype}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _restored(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict):
        if value.keys() == {"tensor", "dtype"}:
            return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(item) for item in value)
    return value
