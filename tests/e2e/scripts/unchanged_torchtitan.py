"""A script of torchtitan that has never heard of tmd: its debug model, smaller, with validation."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

BATCH, LENGTH, VALIDATE = 2, 16, 5
TEXT = [f"{n} and {n * n} and {n**3} and {n % 7}" for n in range(400)]


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


def configured(folder: str, steps: int) -> Any:
    DATASETS["numbers"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_dict({"text": TEXT}), sample_processor=_text
    )
    config = llama3_debugmodel()
    del config.model_spec.model.layers[1:]
    [layer] = config.model_spec.model.layers
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the CPU has no other
    config.loss.num_chunks, config.activation_checkpoint = 2, None  # both cost time
    config.tokenizer, config.dump_folder = Letters.Config(), folder
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="numbers")
    config.validator = Validator.Config(
        enable=True,
        freq=VALIDATE,
        steps=2,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="numbers"),
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    training = config.training
    training.steps, training.seq_len, training.local_batch_size = steps, LENGTH, BATCH
    training.mixed_precision_param = "float32"
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    return config


def _text(sample: dict[str, Any]) -> str:
    return str(sample["text"])


def local_part(param: Tensor) -> Tensor:
    part = param.to_local() if isinstance(param, DTensor) else param
    return part.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    init_logger()
    trainer = configured(args.out, args.steps).build()
    trainer.train()
    found = hashlib.sha256()
    for part in trainer.model_parts:
        for param in part.parameters():
            found.update(local_part(param).numpy().tobytes())
    Path(args.out, f"weights-{dist.get_rank()}").write_text(found.hexdigest())
    trainer.close()


if __name__ == "__main__":
    main()
