"""Fine-tunes a small GPT-2 on text with the ``Trainer`` of Hugging Face transformers.

The text is the source of Python's standard library, and each token is a byte, so that nothing is
downloaded. Only the line marked with `# tmd` differs from a script without tmd.

    torchrun --nproc-per-node 2 examples/transformers/train.py
    make example NAME=transformers
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

from tmd.integrations.transformers import Trainer, TrainingArguments  # tmd

BLOCK_SIZE = 64


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, one after the other."""

    def __init__(self, text: bytes) -> None:
        count = len(text) // BLOCK_SIZE
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * BLOCK_SIZE]
        self.pieces = tokens.view(count, BLOCK_SIZE).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the bytes that are guessed."""
    guessed = np.argmax(prediction.predictions, axis=-1)[:, :-1]
    return {"accuracy": float(np.mean(guessed == prediction.label_ids[:, 1:]))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    folder = os.environ.get("TMD_TRACE") or tempfile.gettempdir()
    args = TrainingArguments(
        output_dir=os.path.join(folder, "gpt2-bytes"),
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    )
    set_seed(args.seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    held_out = 200 * BLOCK_SIZE
    size = {"n_positions": BLOCK_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Text(text[:-held_out]),
        eval_dataset=Text(text[-held_out:]),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
