"""The handle of a running operation, in torch's interface."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import ref

from torch import Tensor
from torch.futures import Future, collect_all

from tmd.fabric.callbacks import Callbacks, on_own_thread
from tmd.fabric.dependent_sums import noticed
from tmd.fabric.wait_timer import WaitTimer
from tmd.torch_private.autograd import called_by_engine
from tmd.torch_private.c10d import Work as TorchWork

WITHOUT_CALLS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
"""Module whose callbacks call no operation. Waiting for them would cost DDP the overlap of
communication and computation."""


SLICE_S = 0.05
"""How often a wait with a time-out looks whether the step is suspended."""


class ResultFuture(Future[list[Tensor]]):
    """The future of a :class:`Work`, which learns of each callback.

    Only those that a script attaches: torch's own, in C++, wait for nothing.
    """

    work: Callable[[], Work | None] = staticmethod(lambda: None)
    """Weak: a script may keep the future alone, and the work holds its tensors."""
    read: Callable[[], None] | None = None
    """See :class:`Work`."""

    def wait(self) -> list[Tensor]:
        """See :meth:`torch.futures.Future.wait`. DDP waits in C++, which does not come here."""
        if self.read is not None:
            self.read()
        return super().wait()

    def then(self, callback: Callable[[Future[list[Tensor]]], Any]) -> Future[Any]:
        """See :meth:`torch.futures.Future.then`."""
        if getattr(callback, "__module__", None) != WITHOUT_CALLS:
            self.expect_callbacks()
            callback = callback if self.read is None else noticed(callback)
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Future[list[Tensor]]], None]) -> None:
        """See :meth:`torch.futures.Future.add_done_callback`."""
        self.expect_callbacks()
        super().add_done_callback(callback if self.read is None else noticed(callback))

    def expect_callbacks(self) -> None:
        """Let the callbacks that are attached from now on run apart from the operation."""
        if (work := self.work()) is not None:
            work.expect_callbacks()


class Work(TorchWork):
    """Completed by the thread that runs the operation.

    An aborted operation completes without error: its tensors hold garbage, and the vote at the end
    of the step discards them. ``wait`` raises only an error in the call itself.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        blocked: WaitTimer,
        callbacks: Callbacks | None = None,
        read: Callable[[], None] | None = None,
    ) -> None:
        """``callbacks``: what runs those of its future, in the order of the operations; each on a
        thread of its own if ``None``. ``read`` is called when the script waits for the result."""
        super().__init__()
        self._read = read
        self._outputs = list(outputs)
        self._callbacks = callbacks
        self._settling: Callable[[Callable[[], None]], None] | None = None
        """What settles the future, if callbacks are attached to it."""
        self._blocked = blocked
        self._done = threading.Lock()
        self._done.acquire()
        self._guard = threading.Lock()
        self._completed = False
        self._error: Exception | None = None
        self._future: ResultFuture | None = None
        self.source = -1
        blocked.called()

    def finish(self, error: Exception | None = None) -> None:
        """Complete, once."""
        with self._guard:
            if self._completed:
                return
            self._error = error
            self._completed = True
            future, settling = self._future, self._settling
        self._blocked.settled()
        self._done.release()
        if settling is not None:
            settling(lambda: self._settle(future))
        elif future is not None:
            self._settle(future)

    def expect_callbacks(self) -> None:
        """Note that callbacks are about to be attached to the future."""
        with self._guard:
            future = self._future
            if not self._completed and self._settling is None:
                own = self._callbacks
                self._settling = on_own_thread if own is None else own.expect()
            settles_here = self._settling is None
        if settles_here and future is not None and not future.done():
            # The operation is complete, and its thread is about to set the result. Wait for that:
            # otherwise that thread would run the callbacks which are attached now.
            with suppress(Exception):
                super(ResultFuture, future).wait()  # not by the script

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until complete. Raises RuntimeError after ``timeout`` (zero: never), in which the
        time does not count for which a loss suspends the step."""
        if self._read is not None and not called_by_engine(sys._getframe()):
            self._read()
        if not self._completed:
            # A negative time-out is torch's value for "not given".
            seconds = timeout.total_seconds()
            with self._blocked:
                if not (self._acquire_within(seconds) if seconds > 0 else self._done.acquire()):
                    raise RuntimeError(f"operation not complete after {seconds} s")
                self._done.release()
        if self._error is not None:
            raise self._error
        return True

    def _acquire_within(self, seconds: float) -> bool:
        left = seconds
        while left > 0:
            began = time.monotonic()
            if self._done.acquire(timeout=min(left, SLICE_S)):
                return True
            if not self._blocked.paused():
                left -= time.monotonic() - began
        return False

    def get_future(self) -> ResultFuture:
        """A future whose value is the list of output tensors, never ``None``."""
        with self._guard:
            if self._future is not None:
                return self._future
            # A future without devices refuses tensors of a device.
            places = {t.device for t in self._outputs if t.device.type != "cpu"}
            self._future = ResultFuture(devices=sorted(places, key=str))
            self._future.work, self._future.read = ref(self), self._read
            completed = self._completed
        if completed:
            self._settle(self._future)
        return self._future

    def _settle(self, future: ResultFuture | None) -> None:
        if future is None:
            return
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

    def __init__(self, parts: Sequence[TorchWork]) -> None:
        super().__init__()
        self._parts = tuple(parts)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all are complete. Each may take ``timeout``."""
        return all(part.wait(timeout) for part in self._parts)

    def get_future(self) -> Future[list[Tensor]]:
        """A future whose value is all output tensors, in the order of the operations."""
        parts = [part.get_future() for part in self._parts]
        for part in parts:
            if isinstance(part, ResultFuture):  # torch's own, if an inner group carries it
                part.expect_callbacks()
        futures = collect_all(parts)
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
