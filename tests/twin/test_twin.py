"""The twin finds accesses that a GPU would not order, and no others."""

from __future__ import annotations

import threading

import torch

from tests.twin.device import Twin
from tests.twin.recorder import Recorder
from tmd.fabric import device
from tmd.trainer.state.window import Window

WEIGHT = 1


def test_streams_are_unordered_until_one_waits_for_an_event_of_the_other() -> None:
    recorder = Recorder()
    recorder.run("a", (), [WEIGHT], "training")
    recorder.run("b", [WEIGHT], (), "a copy")
    assert recorder.races == [
        "a copy in stream b reads what training in stream a writes, and no event orders the two"
    ]

    recorder = Recorder()
    recorder.run("a", (), [WEIGHT], "training")
    recorder.follow("b", recorder.moment("a"))
    recorder.run("b", [WEIGHT], (), "a copy")
    assert recorder.races == []
    assert recorder.ordered == 1


def test_an_event_covers_only_what_was_queued_before_it() -> None:
    recorder = Recorder()
    recorder.run("a", (), [WEIGHT], "training")
    event = recorder.moment("a")
    recorder.run("a", (), [WEIGHT], "training")
    recorder.finish(event)
    recorder.run("b", [WEIGHT], (), "a copy")
    assert len(recorder.races) == 1


def test_two_reads_need_no_order() -> None:
    recorder = Recorder()
    recorder.run("a", [WEIGHT], (), "training")
    recorder.run("b", [WEIGHT], (), "a copy")
    assert recorder.races == []


def test_an_event_covers_what_its_stream_has_waited_for() -> None:
    recorder = Recorder()
    recorder.run("a", (), [WEIGHT], "training")
    recorder.follow("b", recorder.moment("a"))
    recorder.finish(recorder.moment("b"))
    recorder.run("c", [WEIGHT], (), "a copy")
    assert recorder.races == []


def copied_beside(twin: Twin, *, in_window: bool) -> None:
    """Change a weight in a stream of the script, and copy it in another thread."""
    with twin.installed(), twin.training(), twin.stream("training"):
        weight = torch.zeros(4)
        weight += 1
        window = Window(lambda: [weight])
        window.open(1)

        def copy() -> None:
            if in_window:
                with window.reading():
                    device.current().on_host(weight)
            else:
                device.current().on_host(weight)

        thread = threading.Thread(target=copy, name="beside")
        thread.start()
        thread.join()
        window.close()
        weight += 1


def test_a_copy_in_the_window_is_ordered_with_training() -> None:
    twin = Twin()
    copied_beside(twin, in_window=True)
    assert twin.recorder.races == []
    assert twin.recorder.ordered >= 2, "its read after the change, the next change after its read"


def test_a_copy_without_the_window_is_a_race() -> None:
    twin = Twin()
    copied_beside(twin, in_window=False)
    (found,) = twin.recorder.races
    assert "aten::copy_ of thread beside in stream default reads what aten::add_" in found
