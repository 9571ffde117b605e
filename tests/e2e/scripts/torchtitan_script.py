"""The model of ``unchanged_torchtitan`` in several layouts, with accumulation and checkpoints."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tmd.campaign.points import Injector
from tmd.integrations.torchtitan import Trainer, protected  # before torchtitan, for the CPU
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.dtensors import local_part

# isort: split
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import init_logger
from unchanged_torchtitan import configured as plain

ACCUMULATE, SAVE = 2, 5

injector = Injector()


class Watched(Trainer):
    """Has points for faults."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        validator = self.validator
        should, process = validator.should_validate, validator.post_dataloading_process

        def should_validate(step: int) -> bool:
            injector.reach("between")
            return should(step)

        def evaluated(*args: Any) -> Any:
            injector.reach("evaluation")
            return process(*args)

        validator.should_validate, validator.post_dataloading_process = should_validate, evaluated

    def init_distributed(self) -> Any:
        found = super().init_distributed()
        injector.follow(self.session)
        return found

    def forward_backward_step(self, **named: Any) -> Any:
        injector.reach("forward")
        loss = super().forward_backward_step(**named)
        injector.reach("backward")
        return loss


class Exact(MetricsProcessor):
    """Writes down exactly what rank 0 logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, *values: Any, extra_metrics: dict[str, Any], **named: Any) -> None:
        super().log(step, *values, extra_metrics=extra_metrics, **named)
        _write(step, *values, *extra_metrics.values())

    def log_validation(self, loss: float, step: int, *more: Any) -> None:
        super().log_validation(loss, step, *more)
        _write(step, loss)


def _write(step: int, *values: float) -> None:
    if dist.get_rank() == 0:
        with Path(os.environ["TMD_TRACE"], "log").open("a") as file:
            file.write(f"{step} {' '.join(float(value).hex() for value in values)}\n")


def configured(options: argparse.Namespace) -> Trainer.Config:
    ranks = int(os.environ["WORLD_SIZE"])
    config: Trainer.Config = plain(os.environ["TMD_TRACE"], options.steps)
    config.metrics = Exact.Config(log_freq=1)
    training, parallel = config.training, config.parallelism
    training.disable_cuda_graphs = True
    parts = ranks // 2 if options.layout == "tp" else ranks
    training.global_batch_size = training.local_batch_size * ACCUMULATE * parts
    if options.layout == "ddp":
        parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = ranks, 1
    elif options.layout == "hsdp":
        parallel.data_parallel_replicate_degree = 2
    elif options.layout == "tp":
        parallel.tensor_parallel_degree = 2
    config.checkpoint = CheckpointManager.Config(enable=True, interval=SAVE, keep_latest_k=2)
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layout", choices=("fsdp", "ddp", "hsdp", "tp"), default="fsdp")
    init_logger()
    config = protected(configured(parser.parse_args()))
    trainer = Watched(config)
    trainer.train()
    weights = [local_part(p) for m in trainer.model_parts for p in m.parameters()]
    counted = f"{trainer.step} {trainer.ntokens_seen}"
    name = f"weights-{trainer.session.rank}"
    Path(os.environ["TMD_TRACE"], name).write_text(f"{digest_of(weights)} {counted}")


if __name__ == "__main__":
    main()
