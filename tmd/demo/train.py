"""A byte-level GPT on the source of Python's standard library: the script to copy from.

The lines marked with `# tmd` are all that tmd adds. Runs as it is under `tmd launch` (active and
standby hosts alike), under `torchrun`, and with plain `python`.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import tmd.trainer  # tmd


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte. ``tokens``: int64 [batch, time]; returns float [batch, time, 256]."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class StandardLibrary(Dataset[tuple[Tensor, Tensor]]):
    """Every window of ``context + 1`` bytes of the standard library's top-level modules."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.bytes) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    if args.device != "cpu":
        # Kernels may add in any order otherwise, and a standby must compute the same bits.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    session = tmd.trainer.join()  # tmd
    dist.init_process_group("tmd")  # tmd
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps, args.seed)  # tmd
    loader = DataLoader(
        data, batch_size=args.batch, sampler=sampler, num_workers=args.loader_workers
    )

    gpt = GPT(args.width, args.depth, args.heads, args.context).to(args.device)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    session.register(  # tmd
        model=model, optimizer=optimizer, scheduler=scheduler, elastic=args.elastic
    )

    for tokens, targets in session.batches(loader, leave_early=args.leave_early):  # tmd
        with session.step() as step:  # tmd
            optimizer.zero_grad()
            logits = run(tokens.to(args.device))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(args.device).flatten())
            step.record(loss)  # tmd
            loss.backward()
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda:0; of this worker's host")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--leave-early", action="store_true", help="do not end a broken step")
    parser.add_argument("--elastic", action="store_true", help="go on without a rank that is lost")
    return parser.parse_args()


if __name__ == "__main__":
    main()
