"""Prepares tensors for the algorithms: contiguous, on the CPU, outside autograd.

Tensors of a device are copied through page-locked host memory; contiguous CPU tensors are used in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from tmd.fabric import device
from tmd.fabric.memory import writable, writing
from tmd.fabric.wait_timer import WaitTimer


class HostCopies:
    """Host copies of the tensors of one call, made when it runs and copied back after it.

    Created in the caller's thread, so that device work queued before is waited for; ``wait_timer``
    counts that as this worker's own time.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait_timer: WaitTimer
    ) -> None:
        self._wait_timer = wait_timer
        self._outputs = outputs
        self._inputs = inputs
        self.queued = device.current().queued((*outputs, *inputs))

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs in host memory, once it has been entered."""
        return self._staged

    def __enter__(self) -> tuple[list[Tensor], list[Tensor]]:
        if self.queued:
            with self._wait_timer.computing():
                self.queued.wait()
        with self.queued.aside():
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
        pairs = zip(self._outputs, self._staged, strict=True)
        copied = [(t, staged) for t, staged in pairs if staged.data_ptr() != t.data_ptr()]
        if not copied:
            return
        with self.queued.aside(), writing():
            for tensor, staged in copied:
                tensor.data.copy_(staged)


def _host(tensor: Tensor) -> Tensor:
    data, devices = tensor.data, device.current()
    if devices.holds(data):
        return devices.host_memory(data.shape, data.dtype, locked=True).copy_(data)
    return writable(tensor)
