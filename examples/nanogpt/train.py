"""Trains a small GPT on characters with a loop in the manner of nanoGPT's train.py.

The loop has gradient accumulation, a learning rate by the number of the iteration, an evaluation on
held-out text and the best loss so far. The lines marked with `# tmd` are what tmd adds or changes.

    torchrun --nproc-per-node 2 examples/nanogpt/train.py
    make example NAME=nanogpt
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tmd.trainer  # tmd

BLOCK_SIZE = 64
BATCH_SIZE = 4
GRADIENT_ACCUMULATION_STEPS = 2
LEARNING_RATE, MIN_LR, WARMUP_ITERS = 1e-3, 1e-4, 10
GRAD_CLIP = 1.0
EVAL_INTERVAL, EVAL_ITERS = 20, 2
LOG_INTERVAL = 10


class GPT(nn.Module):
    """Predicts the next of 256 characters; ``idx`` and ``targets`` are int64 [batch, time]."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(BLOCK_SIZE, width)
        layers = (
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK_SIZE)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) + self.places.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def load_text() -> dict[str, Tensor]:
    """Real text that is on every machine: the source of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    cut = int(0.9 * len(text))
    return {"train": text[:cut], "val": text[cut:]}


def get_batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Random windows. tmd seeds the generator for each step from this rank's seed and the step."""
    starts = torch.randint(len(text) - BLOCK_SIZE, (BATCH_SIZE,)).tolist()
    windows = torch.stack([text[i : i + BLOCK_SIZE + 1] for i in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def get_lr(it: int, steps: int) -> float:
    if it < WARMUP_ITERS:
        return LEARNING_RATE * (it + 1) / WARMUP_ITERS
    done = (it - WARMUP_ITERS) / max(1, steps - WARMUP_ITERS)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * done)) * (LEARNING_RATE - MIN_LR)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="folder for checkpoints; none by default")
    args = parser.parse_args()

    session = tmd.trainer.join()  # tmd
    dist.init_process_group("tmd")  # tmd
    torch.manual_seed(1337 + session.rank)  # a worker that takes a rank gets its seed, too
    data = load_text()
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    best_val_loss = session.counter("best_val_loss", 1e9)  # tmd
    session.register(model=model, optimizer=optimizer)  # tmd
    if args.out:
        # tmd: instead of torch.save(); resumes, too
        session.checkpoint(args.out, every=50, at_end=True)  # tmd

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        try:
            losses = {
                split: torch.stack([model.module(*get_batch(text)) for _ in range(EVAL_ITERS)])
                for split, text in data.items()
            }
        finally:
            model.train()
        means = torch.stack([each.mean() for each in losses.values()])
        dist.all_reduce(means)
        found = dict(zip(losses, (means / dist.get_world_size()).tolist(), strict=True))
        best_val_loss.value = min(best_val_loss.value, found["val"])
        return found

    def report(losses: dict[str, float]) -> None:
        if session.rank == 0:
            best = best_val_loss.value
            print(f"train {losses['train']:.4f}, val {losses['val']:.4f}, best {best:.4f}")

    evaluate = session.repeatable(estimate_loss, then=report)  # tmd

    for it in session.batches(range(args.steps)):  # tmd
        with session.step() as step:  # tmd
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it, args.steps)
            for micro_step in range(GRADIENT_ACCUMULATION_STEPS):
                model.require_backward_grad_sync = micro_step == GRADIENT_ACCUMULATION_STEPS - 1
                loss = model(*get_batch(data["train"])) / GRADIENT_ACCUMULATION_STEPS
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step.record(loss * GRADIENT_ACCUMULATION_STEPS)  # tmd
        if step.counts and session.rank == 0 and it % LOG_INTERVAL == 0:  # tmd: asked anew
            print(f"iter {it}: loss {loss.item() * GRADIENT_ACCUMULATION_STEPS:.4f}")
        if session.position.index % EVAL_INTERVAL == 0:
            evaluate()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
