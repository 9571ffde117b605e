"""The device that holds a script's tensors: what is queued on it, and copies to host memory.

A script only queues work on a GPU, in streams that are unordered unless an event orders them (CUDA
C++ Programming Guide, "Streams"). A thread of the runtime that reads or writes the script's
tensors first waits for an event of the script's stream. It copies in a stream of its own, so that
the copy neither waits for the script's later work nor delays it. Threads of one name share that
stream: torch caches memory for each stream, and every recovery starts new threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Queued(Protocol):
    """Work that one thread has queued on the devices of some tensors, which can be waited for.
    False if none of them is on a device."""

    def __bool__(self) -> bool: ...

    @property
    def done(self) -> bool:
        """Whether the devices have done it; does not block."""
        ...

    def wait(self) -> None:
        """Block until it is done."""
        ...

    def precede(self) -> None:
        """Let what this thread queues from now on in its current streams come after it."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """What this thread queues on these devices within the context goes to another stream, which
        only threads of its name use.

        At the end of the context it is done.
        """
        ...


class Device(Protocol):
    """Streams and memory of the devices of this process."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is outside of host memory."""
        ...

    def queued(self, tensors: Iterable[Tensor]) -> Queued:
        """What the streams of this thread have queued on the devices of ``tensors`` by now.

        Raises:
            RuntimeError: they are recording a CUDA graph, which would replay an operation on a
                communicator that is gone after a change of members.
        """
        ...

    def host_memory(
        self, shape: Sequence[int], dtype: torch.dtype, *, locked: bool = False
    ) -> Tensor:
        """An uninitialised tensor in host memory.

        ``locked``: page-locked if a device is in use, for fast copies. torch rounds its size up to
        a power of two and keeps the memory, so it is only for what is used again and again.
        """
        ...

    def on_host(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself if it is in host memory, else a copy there."""
        ...


class _Nothing:
    done = True

    def __bool__(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def precede(self) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


class _CudaQueued:
    def __init__(self, places: Iterable[torch.device], own: OwnStreams) -> None:
        self._own = own
        self._events: dict[torch.device, torch.cuda.Event] = {}
        for place in places:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(place))
            self._events[place] = event

    def __bool__(self) -> bool:
        return True

    @property
    def done(self) -> bool:
        return all(e.query() for e in self._events.values())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        for event in self._events.values():
            event.synchronize()

    def precede(self) -> None:
        for place, event in self._events.items():
            torch.cuda.current_stream(place).wait_event(event)

    @contextmanager
    def aside(self) -> Iterator[None]:
        streams = [self._own.on(place) for place in self._events]
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in streams:
                stream.synchronize()


class OwnStreams:
    """Streams beside those of the script: one for each device and name of a thread."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
        self._making = threading.Lock()

    def on(self, place: torch.device) -> torch.cuda.Stream:
        """That of the calling thread."""
        key = threading.current_thread().name, place
        with self._making:
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
            return self._streams[key]


class Cuda:
    """NVIDIA GPUs, or none."""

    def __init__(self) -> None:
        self._own = OwnStreams()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def queued(self, tensors: Iterable[Tensor]) -> Queued:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return NOTHING
        places = {tensor.device for tensor in tensors if tensor.is_cuda}
        if not places:
            return NOTHING
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a collective of tmd was called while a CUDA graph is captured: capture only what "
                "does not communicate, or switch CUDA graphs off in the script or its framework"
            )
        return _CudaQueued(places, self._own)

    def host_memory(
        self, shape: Sequence[int], dtype: torch.dtype, *, locked: bool = False
    ) -> Tensor:
        pinned = locked and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        # A collective may be called in inference mode, and the memory used again outside.
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

    def on_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()


NOTHING = _Nothing()
_current: Device = Cuda()


@contextmanager
def after(queued: Queued) -> Iterator[None]:
    """What this thread queues within the context comes after ``queued``, in a stream that only
    threads of its name use; at the end of the context it is done."""
    queued.wait()
    with queued.aside():
        yield


def current() -> Device:
    """The devices of this process."""
    return _current


def use(device: Device) -> None:
    """Replace the devices of this process, before it joins a job."""
    global _current
    _current = device
