"""Worker processes that live for a whole test module and run one function after another."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

TIMEOUT = 30.0


def _serve(rank: int, size: int, path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    while (job := pipe.recv()) is not None:
        act, args = job
        try:
            pipe.send((True, act(rank, size, store, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """``size`` processes; made by :func:`pool`."""

    def __init__(self, processes: Sequence[mp.process.BaseProcess], pipes: Sequence[Connection]):
        self._processes = processes
        self._pipes = pipes
        self.broken = ""
        """How a rank failed inside an operation: the others may still be in it."""

    def run(self, act: Callable[..., object], *args: object) -> list:
        """Run ``act(rank, size, store, *args)`` on each; an error is raised as AssertionError."""
        assert not self.broken, f"the workers are in disorder since an earlier call: {self.broken}"
        for pipe in self._pipes:
            pipe.send((act, args))
        deadline = time.monotonic() + TIMEOUT
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                answers.append((False, f"rank {rank} does not answer"))
            else:
                good, answer = pipe.recv()
                answers.append((good, answer if good else f"rank {rank}:\n{answer}"))
        faults = [answer for good, answer in answers if not good]
        self.broken = "\n".join(map(str, faults))
        assert not faults, self.broken
        return [answer for _, answer in answers]


@contextmanager
def pool(size: int, path: str) -> Iterator[Pool]:
    """Start ``size`` processes that share a torch store at ``path``; ended with the context."""
    # One process imports torch, the workers are its children: that saves seconds per worker.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "tmd.fabric"])
    ends = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_serve, args=(rank, size, path, there), daemon=True)
        for rank, (_, there) in enumerate(ends)
    ]
    try:
        for process in processes:
            process.start()
        made = Pool(processes, [here for here, _ in ends])
        yield made
        if not made.broken:
            for here, _ in ends:
                here.send(None)
            for process in processes:
                process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join(5)
