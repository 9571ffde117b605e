"""A device that is only a model: its memory is host memory, and its work runs at once.

It records which stream each operation of torch would run in, and what it accesses. So a run on CPUs
uses the code for the tensors of a GPU, and an access that no event orders is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.twin.recorder import Moment, Recorder
from tmd.fabric import device

DEFAULT = "default"
"""The stream of each thread that has chosen none, as in CUDA."""
READ_BACK = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero")
"""Operations whose result the host sees, so that they wait for their stream."""
UNREAD = ("aten::is_pinned",)
"""Operations that ask where a tensor is, and do not read it."""


class _Thread(threading.local):
    stream = DEFAULT
    makes = False
    """Whether what this thread makes from nothing is in the device's memory."""


class Twin(device.Cuda):
    """The devices of a process; install it with :meth:`installed`."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.staged = 0
        """Copies in host memory that were requested."""
        self.staged_bytes = 0
        """Their size."""
        self._memory: set[int] = set()
        self._copied: set[int] = set()
        """Host memory from or to which the device has copied without a wait of the host."""
        self._thread = _Thread()

    # --- as tmd sees it ---------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._memory

    def queued(self, tensors: Iterable[Tensor]) -> device.Queued:
        if not any(map(self.holds, tensors)):
            return device.NOTHING
        return TwinQueued(self, self.recorder.moment(self._thread.stream))

    def host_memory(
        self, shape: Sequence[int], dtype: torch.dtype, *, locked: bool = False
    ) -> Tensor:
        self.staged += 1
        made = torch.empty(tuple(shape), dtype=dtype)
        self.staged_bytes += made.nbytes
        self._memory.discard(memory_of(made))
        return made

    def on_host(self, tensor: Tensor) -> Tensor:
        if not self.holds(tensor):
            return tensor
        return self.host_memory(tensor.shape, tensor.dtype).copy_(tensor)

    # --- as a script uses it ----------------------------------------------------------------------

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before, self._thread.stream = self._thread.stream, name
        try:
            yield
        finally:
            self._thread.stream = before

    @property
    def current_stream(self) -> str:
        return self._thread.stream

    def synchronize(self) -> None:
        """Wait for the current stream."""
        self.recorder.finish(self.recorder.moment(self._thread.stream))

    def move_to_host(self, tensor: Tensor) -> None:
        """Take ``tensor`` for one in host memory from now on."""
        self._memory.discard(memory_of(tensor))

    def forget(self) -> None:
        """Take all tensors for ones in host memory from now on."""
        self._memory.clear()

    @contextmanager
    def training(self) -> Iterator[None]:
        """The context of a script: what it makes is in the device's memory."""
        self._thread.makes = True
        with Recording(self):
            yield

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make it the device of this process and record all threads that start from now on."""
        run, before = threading.Thread.run, device.current()

        def recorded(thread: threading.Thread) -> None:
            with Recording(self):
                run(thread)

        threading.Thread.run = recorded  # type: ignore[method-assign,assignment]
        device.use(self)
        try:
            yield
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]
            device.use(before)

    # --- what runs --------------------------------------------------------------------------------

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Record one operation of torch, and run it."""
        schema, stream = func._schema, self._thread.stream
        given = [*args, *kwargs.values()]
        names = [*(a.name for a in schema.arguments[: len(args)]), *kwargs]
        changed = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        by_name = list(zip(names, given, strict=True))
        touched = {memory_of(t) for _, value in by_name for t in tensors(value)}
        written = {
            memory_of(t) for name, value in by_name if name in changed for t in tensors(value)
        }
        here = touched & self._memory
        queued = bool(here) and ("non_blocking", True) in by_name
        is_view = not changed and any(r.alias_info for r in schema.returns)
        if here and not is_view and schema.name not in UNREAD:
            place = f"{schema.name} of thread {threading.current_thread().name}"
            self.recorder.run(stream, here - written, here & written, place)
        self._on_host(stream, touched - here, written, queued=queued)
        result = run()
        to_host = bool(here) and (
            bool(written - self._memory)
            or str(kwargs.get("device", "")) == "cpu"
            or schema.name in READ_BACK
        )
        if to_host and not queued:
            self.synchronize()
        if not is_view:
            made = {memory_of(t) for t in tensors(result)} - touched
            for memory in made:
                self.recorder.fresh(memory)
            if (here and str(kwargs.get("device", "")) != "cpu") or self._makes(touched):
                self._memory |= made
                self.recorder.run(stream, (), made, str(schema.name))
            else:
                self._memory -= made
        return result

    def _on_host(self, stream: str, touched: set[int], written: set[int], *, queued: bool) -> None:
        """Record what an operation does with host memory that the device may still copy."""
        if queued:
            self._copied |= touched
            self.recorder.run(stream, touched - written, touched & written, "a copy")
        elif found := touched & self._copied:
            self.recorder.on_host(found - written, found & written, "the host")

    def _makes(self, touched: set[int]) -> bool:
        return not touched and self._thread.makes


class TwinQueued:
    """An event of the twin's stream."""

    done = True

    def __init__(self, twin: Twin, moment: Moment) -> None:
        self._twin, self._moment = twin, moment

    def __bool__(self) -> bool:
        return True

    def wait(self) -> None:
        self._twin.recorder.finish(self._moment)

    def precede(self) -> None:
        self._twin.recorder.follow(self._twin.current_stream, self._moment)

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self._twin.stream(f"of threads {threading.current_thread().name}"):
            yield
            self._twin.synchronize()


class Recording(TorchDispatchMode):
    """Reports the operations of one thread to a twin."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self._twin = twin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return self._twin.ran(func, args, named, lambda: func(*args, **named))


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    """The storage of a tensor, by number."""
    return tensor.untyped_storage()._cdata
