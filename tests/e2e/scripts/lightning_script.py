"""A Lightning script with accumulation, clipping, a scheduler, validation and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tmd.campaign.points import Injector
from tmd.integrations.lightning import TmdStrategy
from tmd.trainer.state.digests import digest_of

BATCH, ACCUMULATE, EPOCH_STEPS, RANKS = 4, 2, 8, 3
injector = Injector()


class Net(pl.LightningModule):
    stops: int | None = None
    """The step in which a hook asks for a stop."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 4),
        )

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared, "prepare_data runs on each worker before setup"

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    def forward(self, inputs: Tensor) -> Any:
        return self.net(inputs)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        injector.reach("between")
        injector.reach("forward")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.log("number", float(self.global_step), sync_dist=True, logger=False)
        if self.global_step == self.stops:
            self.trainer.should_stop = True
        return loss

    def on_after_backward(self) -> None:
        injector.reach("backward")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        if not self.trainer.sanity_checking:
            injector.reach(f"validation-{self.current_epoch}")
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        injector.reach(f"epoch-end-{self.current_epoch}")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        Path(os.environ["TMD_TRACE"], "loaded").write_text(str(checkpoint["epoch"]))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Lines(Logger):
    """Appends a line to a file for each call that Lightning makes on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> str:
        return "0"

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """None are used."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        exact = {name: float(value).hex() for name, value in metrics.items()}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **exact}) + "\n")


class Counted(TorchCheckpointIO):
    """Appends a line to a file for each checkpoint that is written or removed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.note("wrote", path)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        self.note("removed", path)

    def note(self, what: str, path: Any) -> None:
        with (self.folder / "files.txt").open("a") as file:
            file.write(f"{what} {Path(path).relative_to(self.folder)}\n")


class Scaled(TensorDataset):
    """Its inputs depend on the epoch."""

    scale = 1.0

    def set_epoch(self, epoch: int) -> None:
        self.scale = 1 + epoch / 10

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, labels = super().__getitem__(index)
        return inputs * self.scale, labels


def loader(batches: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(seed)
    size = batches * BATCH * RANKS
    data = Scaled(torch.randn(size, 16, generator=draw), torch.randint(4, (size,), generator=draw))
    return DataLoader(data, batch_size=BATCH, shuffle=seed == 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--begin", help="a checkpoint of Lightning, or 'last' for the newest if any"
    )
    parser.add_argument("--within", action="store_true", help="save the newest within an epoch")
    parser.add_argument("--stops", type=int, help="the step that asks for a stop")
    args = parser.parse_args()
    folder = Path(os.environ["TMD_TRACE"])
    torch.manual_seed(0)
    strategy = TmdStrategy(checkpoint_io=Counted(folder), bucket_cap_mb=0.001)
    injector.follow(strategy.session)
    when = {"every_n_train_steps": 3} if args.within else {"save_on_train_epoch_end": True}
    newest = ModelCheckpoint(folder / "newest", save_last=True, **when)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=RANKS,
        max_steps=args.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        limit_val_batches=2,
        val_check_interval=4 * ACCUMULATE,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2),
            ModelCheckpoint(folder / "last", every_n_train_steps=5, save_top_k=-1),
            ModelCheckpoint(folder / "latest", monitor="number", mode="max", every_n_train_steps=4),
            EarlyStopping("val_loss", patience=50),
            *([newest] if args.begin else []),
        ],
        logger=[Lines(folder / "lines.json"), CSVLogger(folder / "csv")],
    )
    module = Net()
    module.stops = args.stops
    # One batch less than the steps of an epoch need: the last of them has half of its batches.
    loaders = loader(EPOCH_STEPS * ACCUMULATE - 1, 1), loader(2, 2)
    trainer.fit(module, *loaders, ckpt_path=args.begin)
    weights = digest_of([*module.parameters()])
    (folder / f"weights-{strategy.session.rank}").write_text(weights)


if __name__ == "__main__":
    main()
