"""Prepares tensors for the algorithms: contiguous, on the CPU, outside autograd.

CUDA tensors are copied through pinned host memory; contiguous CPU tensors are used in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from tmd.fabric.wait_timer import WaitTimer


class HostCopies:
    """Host copies of the tensors of one call, made when it runs and copied back after it.

    Created in the caller's thread, so that CUDA work queued before is waited for; ``gauge`` counts
    that as this worker's own time.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait_timer: WaitTimer
    ) -> None:
        self._wait_timer = wait_timer
        self._outputs = outputs
        self._inputs = inputs
        self._queued: list[torch.cuda.Event] = []
        for device in {t.device for t in (*outputs, *inputs) if t.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._queued.append(event)

    def __enter__(self) -> tuple[list[Tensor], list[Tensor]]:
        if self._queued:
            with self._wait_timer.computing():
                for event in self._queued:
                    event.synchronize()
        self._staged = [_host(t) for t in self._outputs]
        if self._inputs is self._outputs:
            return self._staged, self._staged
        return self._staged, [_host(t) for t in self._inputs]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        for tensor, staged in zip(self._outputs, self._staged, strict=True):
            if staged.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(staged)
        for device in {t.device for t in self._outputs if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _host(tensor: Tensor) -> Tensor:
    # `.data` leaves autograd and its version counters unchanged, as a C++ backend does.
    data = tensor.data
    if data.is_cuda:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        return host.copy_(data)
    return data.contiguous() if not data.is_conj() and not data.is_neg() else data.clone()
