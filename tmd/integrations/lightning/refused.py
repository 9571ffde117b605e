"""What of Lightning cannot run on a session, refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from math import inf, lcm
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

log = logging.getLogger("tmd.trainer")

REFUSED = {
    BaseFinetuning: "it changes the parameter groups while training runs",
    GradientAccumulationScheduler: "give Trainer(accumulate_grad_batches=...) one number",
    LearningRateFinder: "it trains before training begins: find the rate in a job without tmd",
    ModelPruning: "it replaces parameters while training runs",
    SpikeDetection: "it asks the other ranks after the vote of a step, and its mean does not move",
    StochasticWeightAveraging: "it replaces the weights outside of a step",
    ThroughputMonitor: "it measures with a clock that a worker which joins has not started",
    Timer: "each rank has a clock of its own: give max_epochs or max_steps",
    WeightAveraging: "its averaged weights are not registered",
}
"""Callbacks that a repeated step or another rank's state would make wrong, and why."""


def refuse(trainer: Trainer) -> None:
    """Refuse by name what would train wrongly. Raises MisconfigurationException."""
    reason = ""
    for callback in trainer.callbacks:
        for kind, why in REFUSED.items():
            if isinstance(callback, kind):
                reason = f"{type(callback).__name__}: {why}"
        if isinstance(callback, ModelCheckpoint):
            reason = _refused_setting(callback) or reason
    if not trainer.lightning_module.automatic_optimization:
        reason = "automatic_optimization=False: let Lightning call the optimizer"
    elif trainer.reload_dataloaders_every_n_epochs:
        reason = "reload_dataloaders_every_n_epochs: a rank that moves could not follow"
    elif trainer._val_check_time_interval is not None:
        reason = "val_check_interval as a time: give it as a number"
    _raise(reason)


def _refused_setting(callback: ModelCheckpoint) -> str:
    """Which setting of ``callback`` cannot be kept, and what to give instead; empty if none."""
    if callback._train_time_interval is not None:
        return "ModelCheckpoint(train_time_interval=...): use every_n_train_steps"
    if callback.save_last == "link":
        return "ModelCheckpoint(save_last='link'): give save_last=True"
    if getattr(callback, "save_on_exception", False):
        return (
            "ModelCheckpoint(save_on_exception=True): a worker that leaves would wait for the "
            "other ranks: give TmdStrategy(checkpoints=...)"
        )
    return ""


def refuse_shared_devices(devices: Sequence[torch.device], workers: int, seen: int) -> None:
    """Refuse a trainer with fewer GPUs than this host has workers, although the host has more.

    Args:
        devices: those that the trainer was given.
        workers: number of workers on this host.
        seen: number of GPUs that this process sees.

    Raises:
        MisconfigurationException: they would share one.
    """
    if devices and devices[0].type == "cuda" and len(devices) < min(workers, seen):
        _raise(
            f"Trainer(devices=...) with {len(devices)} of {seen} GPUs for the {workers} workers of "
            "a host: give devices='auto'"
        )


def own_hooks(trainer: Trainer, hook: str) -> list[str]:
    """The classes of the script that define ``hook``, of its module and callbacks."""
    owners = (trainer.lightning_module, *trainer.callbacks)
    return [type(each).__name__ for each in owners if _has_own(each, hook)]


def warn_of_epoch_hooks(trainer: Trainer) -> None:
    """Warn of hooks of the script that a worker does not run if it joins within an epoch."""
    if names := own_hooks(trainer, "on_train_epoch_start"):
        log.warning(
            "on_train_epoch_start of %s runs after the first batch of an epoch is drawn, and not "
            "on a worker that joins within the epoch: tmd calls set_epoch(0), set_epoch(1), ... of "
            "the data set before that batch; set modes of modules in on_train_batch_start",
            ", ".join(names),
        )


def _has_own(owner: Any, hook: str) -> bool:
    """Whether a class of the script defines ``hook``."""
    if hook in vars(owner):
        return True
    found = next((each for each in type(owner).__mro__ if hook in vars(each)), None)
    return found is not None and not found.__module__.startswith("lightning.")


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
    steps = trainer.accumulate_grad_batches
    reason = ""
    if len(loop._combined_loader.flattened) != 1:
        reason = "several training loaders: combine them into one data set"
    elif isinstance(fetcher, _DataLoaderIterDataFetcher):
        reason = "training_step(dataloader_iter): take a batch"
    elif loop.max_batches == float("inf"):
        reason = "a training loader without a length: give it __len__"
    elif trainer.enable_validation and loop.max_batches and (found := _validation_in_step(loop)):
        epoch, batch = found
        reason = (
            f"val_check_interval of {trainer.val_check_batch} batches: a validation after batch "
            f"{batch} of epoch {epoch} would fall within a step, which has {steps} batches"
        )
    _raise(reason)


def _validation_in_step(loop: _FitLoop) -> tuple[int, int] | None:
    """The epoch and the batch, both counted from 1, after which a validation would come before the
    last batch of a step; ``None`` if none does."""
    trainer, batches = loop.trainer, int(loop.max_batches)
    assert trainer.val_check_batch is not None
    interval, steps = int(trainer.val_check_batch), trainer.accumulate_grad_batches
    last = batches
    if trainer.check_val_every_n_epoch is None:  # it goes on from epoch to epoch
        last = int(min(lcm(interval, batches), _batches_to_train(loop)))
    for count in range(interval, last + 1, interval):
        epoch, batch = divmod(count - 1, batches)
        if (batch + 1) % steps and batch + 1 != batches:
            return epoch + 1, batch + 1
    return None


def _batches_to_train(loop: _FitLoop) -> float:
    """The most batches that all epochs together have."""
    batches, steps = int(loop.max_batches), loop.trainer.accumulate_grad_batches
    limit = inf
    if loop.max_epochs is not None and loop.max_epochs >= 0:
        limit = loop.max_epochs * batches
    if loop.max_steps >= 0:
        epochs, more = divmod(loop.max_steps, -(-batches // steps))
        limit = min(limit, epochs * batches + more * steps)
    return limit


def refuse_resumed(loop: _FitLoop) -> None:
    """Refuse to begin within an epoch. Raises MisconfigurationException."""
    counters = loop.epoch_progress.current
    if loop.is_resuming and counters.started != counters.processed:
        _raise(
            "ckpt_path of a checkpoint that was saved within an epoch: give TmdStrategy("
            "checkpoints=...), or save with ModelCheckpoint(save_on_train_epoch_end=True)"
        )


def refuse_misplaced(loop: _FitLoop, epoch: int) -> None:
    """Refuse a state that is not of ``epoch``, whose batches come next.

    Raises:
        RuntimeError: a session checkpoint of 0.1.0 does not say in which epoch training began.
    """
    if (counted := loop.epoch_progress.current.processed) != epoch:
        raise RuntimeError(
            f"the state is of epoch {counted}, and the next batches are of epoch {epoch}: the "
            "session checkpoint is of tmd 0.1.0, and that job began with another ckpt_path: give "
            "the same one again, or another folder in TmdStrategy(checkpoints=...)"
        )


def refuse_skipped(loop: _TrainingEpochLoop) -> None:
    """Refuse the batch that was not started, and the rest of its epoch.

    Raises MisconfigurationException.
    """
    counters = loop.batch_progress.current
    if counters.started < counters.ready:
        _raise("on_train_batch_start that returns -1: give limit_train_batches")


def refuse_logged(loop: _TrainingEpochLoop) -> None:
    """Refuse sums over an epoch, which a lost rank takes along.

    Raises MisconfigurationException.
    """
    for metric in loop._results.values():
        if metric.meta.on_epoch and not metric.has_reset:
            _raise(f"self.log({metric.meta.name!r}, on_epoch=True) in training: log each step")


def monitors(trainer: Trainer) -> set[str]:
    """Names of the metrics that callbacks and schedulers decide on, and of those in the names of
    checkpoints."""
    return _monitored(trainer) | _in_file_names(trainer)


def _monitored(trainer: Trainer) -> set[str]:
    found = {getattr(c, "monitor", None) for c in trainer.callbacks}
    found |= {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}
    return {name for name in found if isinstance(name, str)}


def _in_file_names(trainer: Trainer) -> set[str]:
    saving = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    texts = [text for c in saving for text in (c.filename, c.CHECKPOINT_NAME_LAST) if text]
    return {name for text in texts for name in re.findall(r"\{(.*?)[:}]", text)}


def callback_keys(results: _ResultCollection, metric: _ResultMetric) -> set[str]:
    """Names by which callbacks find ``metric``: more than one if it is logged for each step and for
    the epoch. With several validation loaders they contain the number of the loader."""
    forms = (False, True) if results.training else (False,)
    return {name for on_step in forms for name in results._forked_name(metric, on_step)}


def refuse_unreduced(trainer: Trainer, results: _ResultCollection) -> None:
    """Refuse a decision on a value that each rank has for itself."""
    # Lightning itself sets the last two, unless a module logs them.
    in_files = _in_file_names(trainer) - {"epoch", "step"}
    monitored = _monitored(trainer) | in_files
    for metric in results.values():
        alone = metric.is_tensor and not metric.meta.sync.should and trainer.world_size > 1
        if alone and (found := monitored & callback_keys(results, metric)):
            own = min(found)
            place = f"a file name with {{{own}}}" if own in in_files else f"monitor={own!r}"
            _raise(f"{place}: log it with sync_dist=True")


def _raise(reason: str) -> None:
    if reason:
        raise MisconfigurationException(f"TmdStrategy does not support {reason}")
