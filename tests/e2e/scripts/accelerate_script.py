"""A loop with Accelerate's own release: shards, accumulation, clipping, evaluation that gathers,
and checkpoints of the session."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import GeneralTracker, on_main_process
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, TensorDataset, default_collate

import tmd.trainer
from tmd.campaign.job import Net, Optimizer, injector
from tmd.integrations.accelerate import batches, microbatches, repeatable
from tmd.trainer.state.digests import digest_of

ACCUMULATE, BATCH, EPOCHS, EVALUATE, SAVE = 2, 8, 3, 5, 10


def data(size: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    samples = torch.randn(size, 16, generator=draw)
    return TensorDataset(samples, torch.randint(4, (size,), generator=draw))


def masked(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Draws random numbers in this process, as a collator does that masks tokens."""
    samples, targets = default_collate(rows)
    return samples * (torch.rand_like(samples) > 0.15), targets


class Lines(GeneralTracker):
    """Appends a line to a file for each call, in the main process."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, file: Path) -> None:
        self.tracker = file
        super().__init__()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """None is used."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None, **_: Any) -> None:
        with self.tracker.open("a") as file:
            file.write(f"{step} {values}\n")

    @on_main_process
    def finish(self) -> None:
        with self.tracker.with_name("finished").open("a") as file:
            file.write(f"{os.getpid()}\n")


def count_writes(folder: Path) -> None:
    """Append a line to a file for each part of a checkpoint that is written, and each joined one.

    torch's writer finishes both, in the folder that it was made for.
    """
    finish = FileSystemWriter.finish

    def counted(writer: FileSystemWriter, *args: Any) -> None:
        finish(writer, *args)
        with (folder / "writes").open("a") as file:
            file.write(f"{Path(writer.path).relative_to(folder / 'checkpoints')}\n")

    FileSystemWriter.finish = counted  # type: ignore[method-assign, assignment]


def written() -> None:
    """Wait until the checkpoint that has begun is complete. A short step waits for no disk."""
    for thread in threading.enumerate():
        if thread.name == "tmd-checkpoint":
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    session = tmd.trainer.join()
    injector.follow(session)
    folder = Path(os.environ["TMD_TRACE"])
    dist.init_process_group("tmd")
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        log_with=Lines(folder / "lines"),
    )
    accelerator.init_trackers("job")
    torch.manual_seed(0)
    # One batch less than all steps of an epoch need: its last step has half of them.
    each = args.steps // EPOCHS * ACCUMULATE - 1
    net = Net(24)
    optimizer = Optimizer(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 15)
    train_data = data(each * BATCH * accelerator.num_processes, 1)
    loader, held_out, model, optimizer, scheduler = accelerator.prepare(
        DataLoader(train_data, BATCH, shuffle=True, collate_fn=masked),
        DataLoader(data(50, 2), BATCH, shuffle=True),
        net,
        optimizer,
        scheduler,
    )
    evaluations = session.counter("evaluations", ())
    session.register(model=model, optimizer=optimizer, scheduler=scheduler)
    count_writes(folder)
    session.checkpoint(folder / "checkpoints", every=SAVE, keep=10)

    @torch.no_grad()
    def evaluate() -> None:
        net.eval()
        try:
            found = [
                accelerator.gather_for_metrics(net(samples).logsumexp(dim=1))
                for samples, _ in session.placed(held_out)
            ]
        finally:
            net.train()
        injector.reach("evaluation")
        values = torch.cat(found)
        assert len(values) == 50
        evaluations.value = (*evaluations.value, float(values.double().sum()).hex())

    def report(_: None) -> None:
        if accelerator.is_main_process:
            with (folder / "reports").open("a") as file:
                file.write(f"{len(evaluations.value)} {evaluations.value[-1]}\n")

    checked = repeatable(session, evaluate, report)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for drawn in batches(session, accelerator, loader):
            with session.step() as step:
                for samples, targets in microbatches(accelerator, model, drawn):
                    loss = torch.nn.functional.cross_entropy(model(samples), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step.record(loss)
            if step.counts:
                accelerator.log({"loss": loss.item().hex()}, step=session.position.index)
            written()
            injector.reach("between")
            if session.position.index % (EVALUATE * ACCUMULATE) == 0:
                checked()
    numbers = f"{digest_of([*net.parameters()])} {evaluations.value}"
    (folder / f"weights-{session.rank}").write_text(numbers)


if __name__ == "__main__":
    main()
