"""The demo's job for the rivals: the same model, data and steps, without anything of tmd.

Runs in workers started by ``torchrun``. The demo's script is the only definition of the job; its
``import tmd.trainer`` (over a second) is replaced by an empty module, so that no rival pays for it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch import Generator, Tensor, nn, randint
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler

sys.modules["tmd.trainer"] = ModuleType("tmd.trainer")
from tmd.demo import train  # noqa: E402


def arguments() -> argparse.Namespace:
    """The demo's own arguments, and what a rival needs besides."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="save here after every step, resume")
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=-1)
    ours, theirs = parser.parse_known_args()
    sys.argv[1:] = theirs
    return argparse.Namespace(**vars(ours), **vars(train.arguments()))


def model(args: argparse.Namespace) -> nn.Module:
    return train.GPT(args.width, args.depth, args.heads, args.context)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


Batches = DataLoader[tuple[Tensor, Tensor]]


class Draw(Sampler[int]):
    """The same indices as tmd's ``StepSampler``: a function of (seed, step, rank)."""

    def __init__(self, size: int, args: argparse.Namespace, place: tuple[int, int], start: int):
        self._size, self._args, self._place, self._start = size, args, place, start

    def __iter__(self) -> Iterator[int]:
        rank, world = self._place
        generator = Generator()
        for step in range(self._start, self._args.steps):
            generator.manual_seed(self._args.seed * 1_000_003 + step)
            drawn = randint(self._size, (world, self._args.batch), generator=generator)
            yield from drawn[rank].tolist()


def batches(args: argparse.Namespace, rank: int, world: int, start: int) -> Batches:
    """(tokens, targets) of each step from ``start``."""
    data = train.StandardLibrary(args.context)
    sampler = Draw(len(data), args, (rank, world), start)
    return DataLoader(data, batch_size=args.batch, sampler=sampler)


class Trace:
    """The same lines as tmd's trace, and the instant of the kill."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._args, self._rank = args, rank
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        args.trace.mkdir(parents=True, exist_ok=True)
        name = f"{rank}.{self._attempt}.{os.getpid()}.jsonl"
        self._file = (args.trace / name).open("a", buffering=1)

    def committed(self, step: int, loss: Tensor, ranks: int) -> None:
        """``ranks``: how many took part in this step."""
        self._write(step=step, loss=float(loss.detach()).hex(), ranks=ranks)

    def fault(self, step: int) -> None:
        """Between forward and backward: kill -9 of this process, on its first attempt only."""
        if (self._rank, step) == (self._args.kill_rank, self._args.kill_step) and not self._attempt:
            self._write(killed=step)
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, **facts: object) -> None:
        line = {"rank": self._rank, "attempt": self._attempt, "at": time.time(), **facts}
        self._file.write(json.dumps(line) + "\n")
