"""A small language model under a framework's own trainer, on tmd or on Gloo, with the time of each
step in ``<trace>/rank-0.jsonl``."""

from __future__ import annotations

import argparse
import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, CONTEXT, WORDS = 4, 64, 256


class Clock:
    """Writes one line for each step of rank 0."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "rank-0.jsonl").open("w", buffering=1)
        self._step = 0

    def tick(self, loss: float = 0.0) -> None:
        line = {"rank": 0, "step": self._step, "at": time.time(), "loss": loss.hex()}
        self._file.write(json.dumps(line) + "\n")
        self._step += 1


def data(steps: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(WORDS, (steps * BATCH * 8, CONTEXT), generator=draw))


def by_transformers(args: argparse.Namespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

    ours = args.side == "tmd"
    trainers: Any = import_module("tmd.integrations.transformers" if ours else "transformers")

    class Ticks(TrainerCallback):
        def __init__(self) -> None:
            self.clock: Clock | None = None

        def on_train_begin(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                self.clock = self.clock or Clock(args.trace)

        def on_step_end(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            if self.clock is not None:
                self.clock.tick()

    settings = trainers.TrainingArguments(
        str(args.trace / "out"),
        max_steps=args.steps,
        per_device_train_batch_size=BATCH,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(0)
    shape = {"n_positions": CONTEXT, "n_embd": args.width, "n_layer": args.depth, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **shape))

    def collate(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        tokens = torch.stack([row for (row,) in rows])
        return {"input_ids": tokens, "labels": tokens}

    trainers.Trainer(
        model, settings, train_dataset=data(args.steps), data_collator=collate, callbacks=[Ticks()]
    ).train()


def by_lightning(args: argparse.Namespace) -> None:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, batch_first=True)
            self.words = nn.Embedding(WORDS, args.width)
            self.body = nn.TransformerEncoder(layer, args.depth, enable_nested_tensor=False)
            self.head = nn.Linear(args.width, WORDS)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            found = self.head(self.body(self.words(batch[0][:, :-1])))
            return nn.functional.cross_entropy(found.flatten(0, 1), batch[0][:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Ticks(pl.Callback):
        clock: Clock | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero:
                self.clock = self.clock or Clock(args.trace)
                self.clock.tick()

    strategy: Any = "ddp"
    if args.side == "tmd":
        from tmd.integrations.lightning import TmdStrategy

        strategy = TmdStrategy()
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=1 if args.side == "tmd" else args.ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks()],
    )
    trainer.fit(Model(), DataLoader(data(args.steps), batch_size=BATCH, shuffle=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=("transformers", "lightning"), required=True)
    parser.add_argument("--side", choices=("tmd", "gloo"), required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    {"transformers": by_transformers, "lightning": by_lightning}[args.framework](args)


if __name__ == "__main__":
    main()
