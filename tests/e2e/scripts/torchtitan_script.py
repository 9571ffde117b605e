"""The debug model of torchtitan, smaller, with validation, accumulation and checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset

from tmd.campaign.points import Injector
from tmd.integrations.torchtitan import Trainer, protected  # before torchtitan, for the CPU
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.dtensors import part

# isort: split
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

ACCUMULATE, BATCH, LENGTH, VALIDATE, SAVE = 2, 2, 16, 5, 5
TEXT = [f"{n} and {n * n} and {n**3} and {n % 7}" for n in range(400)]

injector = Injector()


class Letters(BaseTokenizer):
    """A token for each letter."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_: object) -> list[int]:
        return [1, *map(ord, text), 0]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(map(chr, tokens))

    def get_vocab_size(self) -> int:
        return 256


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
    DATASETS["numbers"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_dict({"text": TEXT}), sample_processor=_text
    )
    config = llama3_debugmodel()
    ranks = int(os.environ["WORLD_SIZE"])
    del config.model_spec.model.layers[1:]
    [layer] = config.model_spec.model.layers
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the CPU has no other
    config.loss.num_chunks, config.activation_checkpoint = 2, None  # both cost time
    config.tokenizer, config.metrics = Letters.Config(), Exact.Config(log_freq=1)
    config.dump_folder = os.environ["TMD_TRACE"]
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="numbers")
    config.validator = Validator.Config(
        enable=True,
        freq=VALIDATE,
        steps=2,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="numbers"),
    )
    training, parallel = config.training, config.parallelism
    parallel.spmd_backend = "partial_dtensor"
    training.steps, training.seq_len, training.disable_cuda_graphs = options.steps, LENGTH, True
    parts = ranks // 2 if options.layout == "tp" else ranks
    training.local_batch_size, training.global_batch_size = BATCH, BATCH * ACCUMULATE * parts
    training.mixed_precision_param = "float32"
    if options.layout == "ddp":
        parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = ranks, 1
    elif options.layout == "hsdp":
        parallel.data_parallel_replicate_degree = 2
    elif options.layout == "tp":
        parallel.tensor_parallel_degree = 2
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    config.checkpoint = CheckpointManager.Config(enable=True, interval=SAVE, keep_latest_k=2)
    return config


def _text(sample: dict[str, Any]) -> str:
    return str(sample["text"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layout", choices=("fsdp", "ddp", "hsdp", "tp"), default="fsdp")
    init_logger()
    config = protected(configured(parser.parse_args()))
    trainer = Watched(config)
    trainer.train()
    weights = [part(p) for m in trainer.model_parts for p in m.parameters()]
    counted = f"{trainer.step} {trainer.ntokens_seen}"
    name = f"weights-{trainer.session.rank}"
    Path(os.environ["TMD_TRACE"], name).write_text(f"{digest_of(weights)} {counted}")


if __name__ == "__main__":
    main()
