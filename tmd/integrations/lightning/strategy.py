"""The strategy of a ``Trainer`` that trains on a session.

It replaces Lightning's fit loop by one that takes its batches from a session. Lightning
computes and updates in its own way. What a step logs or saves is held back until the step counts.
"""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_leaves

import tmd.trainer
from tmd.integrations.lightning.loop import Effect, HeldLogger, SessionFitLoop
from tmd.integrations.lightning.refused import (
    refuse,
    refuse_loggers,
    refuse_shared_devices,
    warn_of_epoch_hooks,
)
from tmd.trainer.worker.join import joined

log = logging.getLogger("tmd.trainer")

_trained: WeakSet[tmd.trainer.Session] = WeakSet()
"""Sessions with which a ``fit`` has begun."""


class TmdStrategy(DDPStrategy):
    """Distributed data parallel training in which ranks move between machines.

    Call the constructor before anything that reads the rank. It joins the job, or uses the session
    with which this process has joined.

    Args:
        state: returns what else a step changes, by name: objects with ``state_dict`` and
            ``load_state_dict``. It is called with the module when training starts.
        checkpoints: arguments of ``session.checkpoint``, from which the job goes on bit for bit.
        ddp: arguments of ``DistributedDataParallel``.

    Raises:
        ValueError: ``checkpoints`` asks for ``at_end``.
    """

    strategy_name = "tmd"

    def __init__(
        self,
        state: Callable[[pl.LightningModule], Mapping[str, object]] | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        if checkpoints is not None and checkpoints.get("at_end"):
            raise ValueError(
                "TmdStrategy(checkpoints=...): at_end would end each epoch with a checkpoint that "
                "Lightning cannot resume from: give ModelCheckpoint(save_last=True) to the trainer"
            )
        # A script may have a trainer to train and another one to test.
        self.session = joined() or tmd.trainer.join()
        self.loss: Any = None
        """Mean loss of the batches of the current step."""
        self._state, self._checkpoints = state, checkpoints
        self._trainer: Any = None
        self._effects: list[Effect] | None = None
        """What is held back; ``None`` while nothing is."""
        self._unusable: list[Any] = []
        """Loggers that cannot be used on this worker."""
        self._by_callback = False
        """Whether a ``ModelCheckpoint`` saves: it does so once the step is over."""
        self._will_exist: dict[str, bool] = {}
        """Path of each checkpoint whose write or removal is held back -> whether it is written."""
        self._began = self._leaves = self._writes = False
        super().__init__(
            cluster_environment=_Environment(self.session), process_group_backend="tmd", **ddp
        )
        self.set_world_ranks()

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes for the job: it holds rank 0, and its steps count."""
        session = self.session
        return session.rank == 0 and not session.shadowing and not self._leaves

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        number: int = self.local_rank % len(self.parallel_devices)
        return torch.device(self.parallel_devices[number])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.session.world_size, "rank": self.session.rank}

    def set_world_ranks(self) -> None:
        """Let Lightning see the rank that is held now."""
        writes = self.is_global_zero
        rank = 0 if writes else self.session.rank or 1
        rank_zero_only.rank = fabric_rank_zero_only.rank = rank
        takes = self._began and writes and not self._writes
        self._writes = writes
        if takes:
            self._open_loggers()

    def _open_loggers(self) -> None:
        """On a worker that takes rank 0: let loggers log the hyperparameters, as where training
        begins. The log of the worker names one that fails, and nothing more is logged to it: the
        next worker would not fare better."""
        cuda = self.root_device.type == "cuda"
        with isolate_rng(include_cuda=cuda):  # a step draws the same as on another worker
            self._trainer.loggers = [
                each if self._can_open(each) else DummyLogger() for each in self._trainer.loggers
            ]

    def _can_open(self, logger: Any) -> bool:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            # It would delete the lines of the folder's former writer.
            logger._version = None
        try:
            if found := _hyperparameters(self._trainer):
                logger.log_hyperparams(found)
            logger.save()
        except Exception:
            log.exception("%s cannot be opened: nothing is logged to it", type(logger).__name__)
            self._unusable.append(logger)
            return False
        return True

    def _save_logs(self) -> None:
        """Let loggers write what they have collected, while this worker still writes."""
        if not self._began or not self._writes:
            return
        self._writes = False
        for logger in self._trainer.loggers:
            try:
                logger.save()
            except Exception:
                log.exception("%s has lost what it had not written", type(logger).__name__)

    def leave(self) -> None:
        """This worker's rank is another's: nothing that Lightning does at its end is written."""
        self._save_logs()
        self._leaves = True
        self.set_world_ranks()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        trainer = self.lightning_module.trainer
        trainer._data_connector.prepare_data = partial(_prepare_data, trainer)
        if not dist.is_initialized():
            refuse_loggers(trainer)
            workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            seen = torch.cuda.device_count()
            refuse_shared_devices(self.parallel_devices or (), workers, seen)
            dist.init_process_group("tmd")

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        if trainer.state.fn == "fit":
            if self.session in _trained:
                raise RuntimeError("tmd runs one Trainer.fit() in a process: start another job")
            refuse(trainer)
            # Before `configure_optimizers`, which may set up the data.
            trainer.fit_loop = SessionFitLoop.of(trainer.fit_loop, self)
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        loader, trainer = super().process_dataloader(dataloader), self.lightning_module.trainer
        if trainer.sanity_checking or trainer.validating:
            # Before the sanity check iterates it: a stream may keep its rank then.
            self.session.placed(loader)
        return loader

    def on_train_start(self) -> None:
        """Register all that a step changes. Called by the fit loop before its first batch."""
        progress = self._trainer.fit_loop.progress
        others: dict[str, Any] = {"lightning": progress}
        if self.lr_scheduler_configs:
            others["schedulers"] = [config.scheduler for config in self.lr_scheduler_configs]
        if getattr(self.precision_plugin, "scaler", None) is not None:
            others["scaler"] = self.precision_plugin.scaler
        if self._state is not None:
            named = self._state(self.lightning_module)
            progress.leave_out(named.values())
            others |= named
        self.session.on_handover(self._save_logs)
        self.session.register(model=self.model, optimizer=self.optimizers, **others)
        if self._checkpoints is not None:
            self.session.checkpoint(**self._checkpoints)
        for each in self._trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint):
                exists: Any = partial(self._file_exists, each.file_exists)
                each.file_exists = exists
                saves: Any = partial(self._saves, each._save_checkpoint)
                each._save_checkpoint = saves
        if self.is_global_zero:
            warn_of_epoch_hooks(self._trainer)
        self._began = True
        _trained.add(self.session)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            part = loss.detach() / self._trainer.accumulate_grad_batches
            self.loss = part if self.loss is None else self.loss + part
        return output

    # --- collectives and files --------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, but not in training, where the loss of a rank would break it."""
        if not self._began:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # A standby that starts alone receives nothing, and another rank's value comes later.
        alone = not self._began and self.session.shadowing
        return obj if alone else super().broadcast(obj, src)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        save = super().save_checkpoint
        if self._effects is not None and self.is_global_zero and not self._by_callback:
            # It is written once the step or the work between two steps counts. The optimizer, or
            # the hook itself, changes the tensors before.
            checkpoint = _copied(checkpoint)
        self._do(partial(save, checkpoint, filepath, *args, **kwargs), filepath, written=True)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._do(partial(super().remove_checkpoint, filepath), filepath, written=False)

    def _do(self, effect: Effect, path: Any, *, written: bool) -> None:
        if self._effects is None:
            effect()
        else:
            self._effects.append(effect)
            self._will_exist[str(path)] = written

    def _saves(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``ModelCheckpoint._save_checkpoint``, whose state need not be copied."""
        self._by_callback = True
        try:
            save(*args, **kwargs)
        finally:
            self._by_callback = False

    def _file_exists(self, ask: Callable[..., bool], filepath: Any, trainer: pl.Trainer) -> bool:
        """``ModelCheckpoint.file_exists``, as if what is held back had been done."""
        known = self._will_exist.get(str(filepath))
        return ask(filepath, trainer) if known is None else known

    @contextmanager
    def held(self) -> Iterator[list[Effect]]:
        """Hold back what is logged, saved or removed in this context; yields the list of it."""
        loggers, self._effects, self._will_exist = self._trainer.loggers, [], {}
        self._trainer.loggers = [
            HeldLogger(each, self._effects, self._unusable) for each in loggers
        ]
        try:
            yield self._effects
        finally:
            self._trainer.loggers, self._effects, self._will_exist = loggers, None, {}


def _copied(checkpoint: Any) -> Any:
    """``checkpoint`` with copies of its tensors in host memory, which share it as these do."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(checkpoint):
        if isinstance(leaf, torch.Tensor):
            place: tuple[Any, ...] = (id(leaf),)
            if leaf.layout is torch.strided and leaf.data_ptr():  # else it wraps other tensors
                bits = leaf.dtype, leaf.is_conj(), leaf.is_neg()
                place = (leaf.data_ptr(), leaf.shape, leaf.stride(), *bits)
            if place not in copies:
                copies[place] = leaf.detach().to("cpu", copy=True)
            memo[id(leaf)] = copies[place]
    return copy.deepcopy(checkpoint, memo)


def _hyperparameters(trainer: pl.Trainer) -> dict[str, Any]:
    """Those of the module and the data module that these have saved for loggers."""
    found: dict[str, Any] = {}
    for each in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if each is not None and each._log_hyperparams:
            found |= each.hparams_initial
    return {name: value for name, value in found.items() if name != "_class_path"}


def _prepare_data(trainer: pl.Trainer) -> None:
    """Call the hooks on each worker, one worker of a machine at a time.

    Lightning calls them on one worker, and lets the others wait in a group of Gloo. A standby has
    none, and needs the data as well.
    """
    with (Path(tempfile.gettempdir()) / f"tmd-prepare-data-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if trainer.datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "prepare_data")
        call._call_lightning_module_hook(trainer, "prepare_data")


class _Environment(TorchElasticEnvironment):
    """Reads the rank from the session, since it changes."""

    def __init__(self, session: tmd.trainer.Session) -> None:
        super().__init__()
        self._session = session

    def world_size(self) -> int:
        return self._session.world_size

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The session knows the number of ranks, whatever ``Trainer`` was given."""

    def global_rank(self) -> int:
        return self._session.rank
