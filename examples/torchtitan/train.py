"""Trains the debug model of torchtitan on characters: FSDP2, accumulation, validation.

The lines marked with `# tmd` are what tmd adds or changes, those with `# CPU` are for a trial
without an accelerator.

    make example NAME=torchtitan
"""

import argparse
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from tmd.integrations.torchtitan import protected  # tmd: before torchtitan

# isort: split
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

LAYERS, LENGTH, BATCH_SIZE, VALIDATE = 2, 32, 2, 20


class Characters(BaseTokenizer):
    """A token for each byte, and two more for the ends of a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.bos_id, self.eos_id = 256, 257

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.bos_id, *text.encode(), self.eos_id]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 258


def source_text(part: slice) -> Dataset:
    """Real text that is on every machine: the source of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[part]
    return Dataset.from_dict({"text": [file.read_text(errors="replace") for file in files]})


def text(sample: dict[str, Any]) -> str:
    return str(sample["text"])


DATASETS["source"] = DatasetConfig("", lambda _: source_text(slice(8, 48)), text)
DATASETS["held_out"] = DatasetConfig("", lambda _: source_text(slice(0, 8)), text)


def configured(steps: int) -> Trainer.Config:
    config = llama3_debugmodel()
    config.tokenizer = Characters.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="source")
    held_out = HuggingFaceTextDataLoader.Config(dataset="held_out")
    config.validator = Validator.Config(enable=True, freq=VALIDATE, steps=4, dataloader=held_out)
    config.training.steps, config.training.seq_len = steps, LENGTH
    config.training.local_batch_size = BATCH_SIZE
    config.training.disable_cuda_graphs = True  # tmd
    config.debug.seed, config.debug.enable_structured_logging = 7, False
    config.parallelism.spmd_backend = "partial_dtensor"
    del config.model_spec.model.layers[LAYERS:]  # CPU: it is slow
    config.loss.num_chunks = 2  # CPU
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # CPU: no other
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    init_logger()
    trainer = protected(configured(args.steps)).build()  # tmd
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
