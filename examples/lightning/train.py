"""Trains a small recurrent network on characters with PyTorch Lightning.

The script has a data module, gradient accumulation, clipping, a learning-rate schedule, validation
and checkpoints of the best weights. The lines marked with `# tmd` are what tmd adds or changes.

    torchrun --nproc-per-node 2 examples/lightning/train.py
    make example NAME=lightning
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tmd.integrations.lightning import TmdStrategy  # tmd

WINDOW, BATCH_SIZE, ACCUMULATE = 32, 8, 2


class Windows(Dataset[Tensor]):
    """Windows of a text, one next to the other."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // WINDOW

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * WINDOW : (index + 1) * WINDOW + 1].long()


class SourceText(pl.LightningDataModule):
    """Real text that is on every machine: the source of Python's standard library."""

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:30]
        raw = bytearray(b"".join(file.read_bytes() for file in files))
        text = torch.frombuffer(raw, dtype=torch.uint8)
        cut = int(0.95 * len(text))
        self.train, self.val = Windows(text[:cut]), Windows(text[cut:])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, batch_size=BATCH_SIZE)


class CharModel(pl.LightningModule):
    """Predicts the next of 256 characters."""

    def __init__(self, width: int = 96, steps: int = 60) -> None:
        super().__init__()
        self.steps = steps
        self.embedding = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def loss_of(self, windows: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(windows[:, :-1]))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        loss = self.loss_of(windows)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, windows: Tensor, index: int) -> None:
        self.log("val_loss", self.loss_of(windows), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    out = Path(tempfile.gettempdir(), "tmd-example-lightning")
    parser.add_argument("--out", default=str(out), help="folder for logs and weights")
    args = parser.parse_args()

    strategy = TmdStrategy()  # tmd: before anything reads the rank
    pl.seed_everything(7)
    best = ModelCheckpoint(Path(args.out, "best"), "{step}-{val_loss:.3f}", monitor="val_loss")
    trainer = pl.Trainer(
        strategy=strategy,  # tmd: instead of "ddp"
        accelerator="cpu",
        max_steps=args.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        limit_train_batches=20 * ACCUMULATE,
        limit_val_batches=4,
        log_every_n_steps=5,
        enable_progress_bar=False,
        callbacks=[best],
        logger=CSVLogger(args.out),
    )
    trainer.fit(CharModel(steps=args.steps), SourceText())
    if trainer.is_global_zero:
        print(f"best validation loss {best.best_model_score:.4f} in {best.best_model_path}")


if __name__ == "__main__":
    main()
