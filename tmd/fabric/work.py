"""The handle of a running operation, in torch's interface."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future, collect_all

from tmd.fabric.wait_timer import WaitTimer
from tmd.torch_private.c10d import Work as TorchWork


class Work(TorchWork):
    """Completed by the thread that runs the operation.

    An aborted operation completes without error: its tensors hold garbage, and the vote at the end
    of the step discards them. ``wait`` raises only an error in the call itself.
    """

    def __init__(self, outputs: Sequence[Tensor], blocked: WaitTimer) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._blocked = blocked
        self._done = threading.Lock()
        self._done.acquire()
        self._guard = threading.Lock()
        self._completed = False
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None
        self.source = -1
        blocked.called()

    def finish(self, error: Exception | None = None) -> None:
        """Complete, once."""
        with self._guard:
            if self._completed:
                return
            self._error = error
            self._completed = True
            future = self._future
        self._blocked.settled()
        self._done.release()
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until complete. Raises RuntimeError after ``timeout`` (zero: never)."""
        if not self._completed:
            # A negative time-out is torch's value for "not given".
            seconds = timeout.total_seconds()
            with self._blocked:
                if not self._done.acquire(timeout=seconds if seconds > 0 else -1):
                    raise RuntimeError(f"operation not complete after {seconds} s")
                self._done.release()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[list[Tensor]]:
        """A future whose value is the list of output tensors, never ``None``."""
        with self._guard:
            if self._future is not None:
                return self._future
            # A future without devices refuses tensors of a device.
            places = {t.device for t in self._outputs if t.device.type != "cpu"}
            self._future = Future(devices=sorted(places, key=str))
            completed = self._completed
        if completed:
            self._settle(self._future)
        return self._future

    def _settle(self, future: Future[list[Tensor]]) -> None:
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)

    def is_completed(self) -> bool:
        return self._completed

    def is_success(self) -> bool:
        return self._completed and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Group rank a message came from."""
        return self.source

    _source_rank = source_rank


class Joint(TorchWork):
    """Several operations that torch waits for as one."""

    def __init__(self, parts: Sequence[Work]) -> None:
        super().__init__()
        self._parts = tuple(parts)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all are complete. Each may take ``timeout``."""
        return all(part.wait(timeout) for part in self._parts)

    def get_future(self) -> Future[list[Tensor]]:
        """A future whose value is all output tensors, in the order of the operations."""
        futures = collect_all([part.get_future() for part in self._parts])
        return futures.then(lambda done: [t for each in done.value() for t in each.value()])

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        return all(part.is_success() for part in self._parts)

    def exception(self) -> Any:
        return next((e for part in self._parts if (e := part.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part.result()]

    def synchronize(self) -> None:
        self.wait()
