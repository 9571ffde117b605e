"""The streams of the runtime's threads, on a GPU."""

from __future__ import annotations

import threading

import torch

from tests.gpu import NEEDS_GPU
from tmd.fabric import device

pytestmark = NEEDS_GPU


def test_threads_of_one_name_share_a_stream_and_its_memory() -> None:
    """A thread for each loss would otherwise leave memory behind in a stream of its own."""
    tensor = torch.ones(1 << 20, device="cuda")
    used: list[tuple[int, int]] = []

    def work() -> None:
        with device.after(device.current().queued([tensor])):
            (tensor * 2).sum()
            used.append((torch.cuda.current_stream().cuda_stream, torch.cuda.memory_reserved()))

    for _ in range(5):
        thread = threading.Thread(target=work, name="tmd-early-digest")
        thread.start()
        thread.join()

    assert len(set(used)) == 1
    assert used[0][0] != torch.cuda.default_stream().cuda_stream
