"""How copies use streams and events, on a stand-in for ``torch.cuda`` that lists the calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tmd.fabric import device

GPU = torch.device("cuda", 0)


class Cuda:
    """Streams by name; ``events`` is what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = "script"
        self.streams = 0
        self.capturing = False

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, place: torch.device) -> Any:
        name = self.current
        return SimpleNamespace(
            name=name, wait_event=lambda event: self.events.append(f"{name} waits for {event.of}")
        )

    def Event(self) -> Any:
        event = SimpleNamespace(of="nothing")

        def record(stream: Any) -> None:
            event.of = stream.name
            self.events.append(f"event in {stream.name}")

        event.record = record
        event.synchronize = lambda: self.events.append(f"host waits for {event.of}")
        return event

    def Stream(self, place: torch.device) -> Any:
        self.streams += 1
        name = f"own {self.streams}"
        wait = lambda: self.events.append(f"host waits for {name}")  # noqa: E731
        return SimpleNamespace(name=name, synchronize=wait)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    names = ("is_initialized", "is_current_stream_capturing", "current_stream")
    for name in (*names, "Event", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def on_gpu() -> Tensor:
    return cast(Tensor, SimpleNamespace(is_cuda=True, device=GPU))


def test_a_copy_comes_after_the_caller_in_a_stream_of_its_own(cuda: Cuda) -> None:
    queued = device.Cuda().queued([on_gpu(), on_gpu(), torch.ones(1)])
    with device.after(queued):
        cuda.events.append(f"copy in {cuda.current}")
    with queued.aside():
        cuda.events.append(f"copy in {cuda.current}")

    assert cuda.events == [
        "event in script",
        "host waits for script",
        "copy in own 1",
        "host waits for own 1",
        "copy in own 1",
        "host waits for own 1",
    ]
    assert cuda.current == "script"


def test_threads_of_one_name_share_a_stream(cuda: Cuda) -> None:
    """A thread is made for each loss, and torch keeps memory for each stream."""
    queued = device.Cuda().queued([on_gpu()])

    def copy() -> None:
        with queued.aside():
            cuda.events.append(f"{threading.current_thread().name} in {cuda.current}")

    for name in ("digest", "digest", "mirror"):
        thread = threading.Thread(target=copy, name=name)
        thread.start()
        thread.join()

    copies = [each for each in cuda.events if "host waits" not in each]
    assert copies == ["event in script", "digest in own 1", "digest in own 1", "mirror in own 2"]


def test_later_work_can_come_after_another_stream(cuda: Cuda) -> None:
    with cuda.stream(SimpleNamespace(name="optimizer")):
        queued = device.Cuda().queued([on_gpu()])
    queued.precede()
    assert cuda.events == ["event in optimizer", "script waits for optimizer"]


def test_a_collective_in_a_cuda_graph_is_refused(cuda: Cuda) -> None:
    """A replay would use a communicator that a change of members has freed."""
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="switch CUDA graphs off"):
        device.Cuda().queued([on_gpu()])
    assert not device.Cuda().queued([torch.ones(1)])


def test_tensors_in_host_memory_need_no_event(cuda: Cuda) -> None:
    queued = device.Cuda().queued([torch.ones(1)])
    assert not queued
    with device.after(queued):
        queued.precede()
    assert cuda.events == []


def test_host_memory_may_be_written_in_any_mode() -> None:
    """A collective may be called in inference mode, and its memory be used again outside."""
    with torch.inference_mode():
        memory = device.current().host_memory((4,), torch.uint8)
    memory.copy_(torch.ones(4, dtype=torch.uint8))

    assert not memory.is_inference()
