"""Trains a classifier with Hugging Face Accelerate: accumulation, clipping, a schedule, validation.

The lines marked with `# tmd` are what tmd adds or changes.

    make example NAME=accelerate
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tmd.trainer  # tmd
from tmd.integrations.accelerate import batches, microbatches, repeatable  # tmd

ACCUMULATE, BATCH, EPOCHS, WIDTH = 2, 64, 3, 1024


def spirals(size: int, seed: int) -> TensorDataset:
    """Points on three spirals, and the number of their spiral."""
    draw = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (size,), generator=draw)
    radius = torch.rand(size, generator=draw)
    angle = 4 * radius + arm * 2.1 + 0.2 * torch.randn(size, generator=draw)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arm)


def build() -> nn.Module:
    hidden = (nn.Linear(2, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    session = tmd.trainer.join()  # tmd
    dist.init_process_group("tmd")  # tmd: before the accelerator, which takes it as it is
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # tmd
    )
    torch.manual_seed(7)
    size = args.steps // EPOCHS * ACCUMULATE * BATCH * accelerator.num_processes
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * args.steps)
    loader, held_out, model, optimizer, scheduler = accelerator.prepare(
        DataLoader(spirals(size, 0), batch_size=BATCH, shuffle=True),
        DataLoader(spirals(500, 1), batch_size=BATCH),
        model,
        optimizer,
        scheduler,
    )
    session.register(model=model, optimizer=optimizer, scheduler=scheduler)  # tmd

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        try:
            right: list[Tensor] = []
            for points, arm in session.placed(held_out):  # tmd: for the rank held now
                found = model(points).argmax(dim=1)
                right.append(accelerator.gather_for_metrics(found == arm))
        finally:
            model.train()
        return torch.cat(right).float().mean().item()

    def report(accuracy: float) -> None:
        if accelerator.is_main_process:
            print(f"step {scheduler.scheduler.last_epoch}: accuracy {accuracy:.3f}")

    evaluate = repeatable(session, validate, then=report)  # tmd

    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for drawn in batches(session, accelerator, loader):  # tmd
            with session.step() as step:  # tmd
                for points, arm in microbatches(accelerator, model, drawn):  # tmd
                    loss = nn.functional.cross_entropy(model(points), arm)
                    step.record(loss)  # tmd
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        evaluate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
