"""A script that trains with the ``Trainer`` of transformers itself, or with that of tmd."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import tmd.integrations.transformers as ours
from tests.e2e.scripts.transformers_script import CLOCK, Tokens
from tmd.trainer.state.digests import digest_of

CASES: dict[str, dict[str, Any]] = {
    "epochs": {
        "num_train_epochs": 6,
        "gradient_accumulation_steps": 3,
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    },
    "steps": {
        "max_steps": 23,
        "logging_steps": 4,
        "logging_first_step": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "eval_delay": 6,
        "save_strategy": "best",
        "metric_for_best_model": "eval_share",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "include_num_input_tokens_seen": True,
    },
    "mixed": {
        "num_train_epochs": 3,
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 7,
        "max_grad_norm": 0.0,
        "dataloader_num_workers": 1,
    },
}
CASES["stream"] = {
    "max_steps": 12,
    "gradient_accumulation_steps": 3,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "no",
}
CASES["generates"] = {
    "max_steps": 12,
    "logging_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 6,
    "save_strategy": "steps",
    "save_steps": 6,
    "predict_with_generate": True,
    "generation_max_length": 14,
    "generation_num_beams": 2,
}
CASES["limit"] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1000,
    "save_strategy": "steps",
}


def share(results: Any) -> dict[str, float]:
    return {"share": float(np.mean(np.argmax(results.predictions, -1) == results.label_ids))}


def spread(results: Any) -> dict[str, float]:
    """A number that depends on each token that was generated."""
    return {"share": float(np.mean(results.predictions * np.arange(results.predictions.shape[1])))}


def translator() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


class Ragged(Tokens):
    """Some tokens do not count."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": torch.where(row % 7 == index % 7, -100, row)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Four steps of three batches; its length is not known."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Ragged(96, 1)
        return (rows[index] for index in range(len(rows)))


class Stop(TrainerCallback):
    """Ends all processes in the middle of training, with no word to anyone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os._exit(1)


class Ask(TrainerCallback):
    """Ends training after the first step of an epoch, and evaluates when streamed data end."""

    def __init__(self, case: str) -> None:
        self.case = case

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.case == "mixed" and (state.epoch or 0) >= 2

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate |= self.case == "stream"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("whose", choices=("theirs", "ours"))
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop", type=int, default=0, help="the process ends after this step")
    parser.add_argument("--first", action="store_true", help="evaluate before training, too")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    parser.add_argument("--apart", action="store_true", help="a folder for each rank")
    parser.add_argument("--more", type=json.loads, default={}, help="more arguments")
    options = parser.parse_args()
    kind: Any = transformers if options.whose == "theirs" else ours
    generates = options.case == "generates"
    arguments = kind.Seq2SeqTrainingArguments if generates else kind.TrainingArguments
    args = arguments(
        output_dir=str(options.folder / ("out" + os.environ["RANK"] * options.apart)),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        report_to="none",
        **(CASES[options.case] | options.more),
    )
    transformers.set_seed(1)
    # No dropout: tmd draws its random numbers anew for each step.
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **none)
    model = translator() if generates else GPT2LMHeadModel(config)
    stops: list[Any] = [EarlyStoppingCallback(1, 0.5)] if options.case == "epochs" else []
    trainer = (kind.Seq2SeqTrainer if generates else kind.Trainer)(
        model=model,
        args=args,
        train_dataset=Stream() if options.case == "stream" else Ragged(82, 1),
        eval_dataset=Ragged(21, 2),
        compute_metrics=spread if generates else share,
        callbacks=[*stops, Stop(options.stop), Ask(options.case)],
    )
    if options.first:
        trainer.evaluate()
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    logs = [
        {name: value for name, value in each.items() if not name.endswith(CLOCK)}
        for each in trainer.state.log_history
    ]
    facts = {
        "logs": logs,
        "loss": result.training_loss,
        "weights": digest_of([*trainer.model.parameters()]),
        "best": trainer.state.best_global_step,
        "best_checkpoint": Path(trainer.state.best_model_checkpoint or "-").name,
        "step": trainer.state.global_step,
    }
    (options.folder / f"{args.process_index}.json").write_text(json.dumps(facts))
    if options.whose == "theirs":
        # Gloo's threads may abort a process whose interpreter ends.
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
