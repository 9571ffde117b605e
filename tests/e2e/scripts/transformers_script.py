"""A script of transformers as its users write it. Only the import of the trainer is changed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from tmd.campaign.points import Injector
from tmd.integrations.transformers import Trainer, TrainingArguments, session
from tmd.trainer.state.digests import digest_of

ACCUMULATE, BATCH, EVALUATE, SAVE, TELL = 2, 4, 5, 10, 8
CLOCK = ("runtime", "per_second")
"""Ends of the names of what is logged of the speed."""
VALUES = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "batch")

injector = Injector()


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random number, with some noise."""

    def __init__(self, size: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(32, (size, 1), generator=draw)
        noise = torch.randint(2, (size, 12), generator=draw)
        self.rows = (starts + torch.arange(12) + noise) % 32

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Six steps; its length is not known."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Tokens(3 * BATCH * ACCUMULATE * 6, 1)
        return (rows[index] for index in range(len(rows)))


class Watch(TrainerCallback):
    """Writes down what rank 0 logs and saves, and has points for faults. ``writes``: whether it
    writes down a value, by its name."""

    def __init__(
        self,
        folder: Path,
        *,
        streams: bool = False,
        writes: Callable[[str], bool] = VALUES.__contains__,
    ) -> None:
        self.folder, self.streams, self.writes = folder, streams, writes

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            exact = {n: float(v).hex() for n, v in logs.items() if self.writes(n)}
            with (self.folder / "log").open("a") as file:
                file.write(json.dumps({"step": state.global_step, **exact}) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            with (self.folder / "saves").open("a") as file:
                file.write(f"{state.global_step}\n")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        injector.reach("between")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        injector.reach("forward")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        injector.reach("backward")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        injector.reach("epoch-end")
        control.should_evaluate |= self.streams

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        injector.reach("evaluation")


class Steps(TrainerCallback, ExportableState):
    """Counts the steps of the whole run."""

    def __init__(self) -> None:
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


class Saving(Trainer):
    """Logs in some steps, and has a point for faults with a part of a checkpoint written.

    Writes down the begin and the end of each write of a checkpoint, by whatever process, and where
    a shadow passes by one.
    """

    def compute_loss(self, model: Any, *args: Any, **named: Any) -> Any:
        found = super().compute_loss(model, *args, **named)
        if model.training and self.state.global_step % TELL == 0:
            self.log({"batch": float(found.detach())})
        return found

    def save_model(self, folder: str, *args: Any, **named: Any) -> None:
        note("writes", f"{Path(folder).name} begun")
        super().save_model(folder, *args, **named)
        injector.reach("saving")

    def _save_rng_state(self, folder: str) -> None:
        super()._save_rng_state(folder)  # the last file but one, with what is compared
        note("writes", f"{Path(folder).name} whole")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if session().shadowing:
            note("shadowed", f"rank {session().rank} checkpoint-{self.state.global_step}")


def note(name: str, line: str) -> None:
    with Path(os.environ["TMD_TRACE"], name).open("a") as file:
        file.write(line + "\n")


def accuracy(results: Any) -> dict[str, float]:
    """Share of the tokens that are predicted."""
    guesses = np.argmax(results.predictions, -1)[:, :-1]
    return {"accuracy": float((guesses == results.label_ids[:, 1:]).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--patience", type=int, default=100, help="evaluations before it ends")
    parser.add_argument("--stream", action="store_true", help="data of unknown length")
    parser.add_argument("--resume", help="a checkpoint-N, or 'last' for the newest one if any")
    options = parser.parse_args()
    folder = Path(os.environ["TMD_TRACE"])
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-2,
        warmup_steps=3,
        max_grad_norm=0.5,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=EVALUATE,
        save_strategy="steps",
        save_steps=SAVE,
        save_total_limit=2,
        load_best_model_at_end=True,
        restore_callback_states_from_checkpoint=options.resume is not None,
        report_to="none",
    )
    injector.follow(session())
    with args.main_process_first():
        # Its last step of an epoch has one batch instead of two.
        train_data, held_out = Tokens(3 * BATCH * (ACCUMULATE * 9 - 1), 1), Tokens(40, 2)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    trainer = Saving(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Stream() if options.stream else train_data,
        eval_dataset=held_out,
        compute_metrics=accuracy,
        callbacks=[
            Watch(folder, streams=options.stream),
            Steps(),
            EarlyStoppingCallback(options.patience, 10.0),
        ],
    )
    resumed = options.resume
    if resumed == "last":
        resumed = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    if resumed:
        (folder / f"found-{os.getpid()}").write_text(Path(resumed).name)
    result = trainer.train(resume_from_checkpoint=resumed)
    trainer.evaluate()
    digest = digest_of([*trainer.model.parameters()])
    (counted,) = (c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Steps))
    numbers = f"loss {result.training_loss!r} flos {trainer.state.total_flos!r} steps {counted}"
    (folder / f"weights-{session().rank}").write_text(f"{digest} {numbers}")


if __name__ == "__main__":
    main()
