"""The ``Trainer`` of torchtitan, whose steps a session repeats if a rank is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as original
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.metrics import BaseLogger
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger

import tmd.trainer
from tmd.integrations.torchtitan.refused import PREFIX, refuse, refuse_saved, refuse_validator
from tmd.trainer import DataPlace

Calls = list[partial[Any]]
NOBODY = -1
"""In place of a rank: this worker has given its rank away, and logs for none."""


class Trainer(original.Trainer):
    """As in torchtitan, but a standby can take over a rank while it trains."""

    @dataclass(kw_only=True, slots=True)
    class Config(original.Trainer.Config):
        """As in torchtitan. :func:`protected` makes one of a config of torchtitan."""

    def init_distributed(self) -> Any:
        """Join the job of this process, and make the process group.

        Raises:
            ValueError: the config asks for something that is not supported.
        """
        refuse(self.config)
        # Its own checkpoints are written by ranks that wait for each other.
        self._checkpoint, self.config.checkpoint = (
            self.config.checkpoint,
            replace(self.config.checkpoint, enable=False),
        )
        self.session = tmd.trainer.join()
        dist.init_process_group("tmd")
        # As torchtitan does where it makes the group itself.
        torch.autograd.set_multithreading_enabled(False)
        return super().init_distributed()

    def train(self) -> None:
        """Train to the last step of the config, or to the end of the data.

        Raises:
            ValueError: an override of the config, the validator, or what is in the folder of the
                checkpoints is not supported.
        """
        # torchtitan applies overrides while it builds.
        refuse(self.config)
        if self.config.checkpoint.enable:
            raise ValueError(f"{PREFIX} an override of checkpoint: set it in the config itself")
        self._register()
        session, count = self.session, self.gradient_accumulation_steps
        validate = session.repeatable(self._validate, self._publish, name="validation")
        started = False
        for drawn in session.batches(self._batches, accumulate=count):
            if not started:  # not before: batches() restores the step of a checkpoint
                logger.info("Training starts at step %d", self.step + 1)
                started = True
            logs: Calls = []
            with session.step() as step:
                self.step += 1
                structured_logger.set_step(self.step)
                self.gc_handler.run(self.step)
                logs = self._update(drawn if count > 1 else [drawn])
                for each in logs:
                    step.record(each.args[1])
            if step.counts:
                self._publish(logs)
            if self.config.validator.enable and self.validator.should_validate(self.step):
                validate()
        logger.info("Training completed")

    def _register(self) -> None:
        config, mesh = self._checkpoint, self.parallel_dims.get_optional_mesh
        self._mesh = mesh("batch", include_singleton_axes=True)
        if self.config.validator.enable:
            refuse_validator(self.validator)
        self._logged: dict[str, int] = {}
        self._logs_as = self.session.rank
        for module in (each for part in self.model_parts for each in part.modules()):
            if isinstance(module, FSDPModule):
                # Only NCCL multiplies in a reduction, by what torchtitan sets to one.
                module.set_force_sum_reduction_for_comms(True)
        (model,) = self.model_parts  # a pipeline, which has several, is refused
        self.session.register(
            model=model,
            optimizer=self.optimizers,
            scheduler=self.lr_schedulers,
            trainer=self,
            data_mesh=self._mesh,
        )
        if config.enable:
            folder = os.path.join(self.config.dump_folder, config.folder)
            refuse_saved(folder)
            keep = config.keep_latest_k or self.config.training.steps
            self.session.checkpoint(folder, every=config.interval, keep=keep, at_end=True)
        self.session.on_handover(self._close_loggers)

    def _batches(self, place: DataPlace) -> Iterable[Any]:
        training = self.config.training
        loader = self.config.dataloader.build(
            dp_world_size=place.parts,
            dp_rank=place.part,
            tokenizer=self.tokenizer,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            snapshot_every_n_steps=None,
        )
        return islice(loader, training.steps * self.gradient_accumulation_steps)

    def _update(self, drawn: list[Any]) -> Calls:
        """One step. Returns what is to be logged."""
        with _put_off((self.metrics_processor, "log")) as logs:
            self.train_step(self.batch_generator(drawn))
        return logs

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """As in torchtitan, which reduces what it logs behind the optimizer. All collectives of a
        step come before its vote, so the update is put off to the end of this method."""
        updates = (self.optimizers, "step"), (self.lr_schedulers, "step")
        with _put_off(*updates) as calls:
            super().train_step(data_iterator)
        for update in calls:
            update()

    def _validate(self) -> Calls:
        self.validator.dp_rank = self._mesh.get_local_rank()
        try:
            with _put_off((self.metrics_processor, "log_validation")) as logs:
                self.validator.validate(self.model_parts, self.step)
        finally:
            for model in self.model_parts:
                model.train()
        return logs

    def _close_loggers(self) -> None:
        """This worker has given its rank away: write what it has logged to disk."""
        self.metrics_processor.logger.close()
        self.metrics_processor.logger, self._logs_as = BaseLogger(), NOBODY

    def _publish(self, logs: Calls) -> None:
        """Log what was put off, each step once, as the rank that this worker holds now."""
        metrics, config = self.metrics_processor, self.config
        if logs and self._logs_as != self.session.rank:
            self._logs_as = self.session.rank
            metrics.logger.close()
            metrics.logger = metrics._build_metric_logger(
                config=config.metrics,
                parallel_dims=self.parallel_dims,
                dump_folder=config.dump_folder,
                pp_schedule=config.parallelism.pipeline_parallel_schedule,
                config_dict=config.to_dict(),
            )
        for each in logs:
            name: str = each.func.__name__
            step: int = self.step
            if step > self._logged.get(name, 0):
                self._logged[name] = step
                each()


def protected(config: original.Trainer.Config) -> Trainer.Config:
    """The same config for :class:`Trainer`.

    Raises:
        ValueError: it belongs to a trainer other than that of torchtitan.
    """
    if type(config) is not original.Trainer.Config:
        raise ValueError(
            f"{PREFIX} the trainer of {type(config).__qualname__}: let it be a subclass of "
            "tmd.integrations.torchtitan.Trainer"
        )
    return Trainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


@contextmanager
def _put_off(*methods: tuple[Any, str]) -> Iterator[Calls]:
    """Yields a list to which each call of these methods is added, instead of being made."""
    calls: Calls = []

    def keep(method: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args, **named: calls.append(partial(method, *args, **named))

    before = [(owner, name, vars(owner).get(name)) for owner, name in methods]
    for owner, name in methods:
        setattr(owner, name, keep(getattr(owner, name)))
    try:
        yield calls
    finally:
        for owner, name, own in before:
            delattr(owner, name)
            if own is not None:
                setattr(owner, name, own)
