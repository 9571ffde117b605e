"""Hugging Face Accelerate: the loop around prepared objects (docs/start/accelerate.md).

>>> session = tmd.trainer.join()
>>> dist.init_process_group("tmd")
>>> accelerator = Accelerator(
...     dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
... )
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import AcceleratorState, PartialState
except ImportError as error:
    raise ImportError(
        "tmd.integrations.accelerate needs accelerate: run pip install 'tmd-trainmover[accelerate]'"
    ) from error

from tmd.trainer import Session
from tmd.trainer.worker.join import joined

T = TypeVar("T")

log = logging.getLogger("tmd.trainer")


def batches(session: Session, accelerator: Accelerator, loader: Any) -> Iterator[list[Any]]:
    """Yields the batches of each optimizer step, as many as the accelerator accumulates.

    Use instead of iterating over the prepared ``loader``. The last list of an epoch may be shorter.
    The accelerator reports the rank that this worker holds now.

    Raises:
        ValueError: the loader cannot be divided anew, since it broadcasts random generators or
            batches, or an optimizer changes all parameters for an evaluation.
    """
    refuse_switching(accelerator._optimizers)
    count = accelerator.gradient_accumulation_steps
    for drawn in session.batches(loader, accumulate=count, partial=True):
        _follow(session)
        begin_step(accelerator)
        kept = drawn if count > 1 else [drawn]
        with _at_its_end(loader) if len(kept) < count else nullcontext():
            yield kept
    _follow(session)  # a worker may take its rank at the end, where it gets no batch


@contextmanager
def _at_its_end(loader: Any) -> Iterator[None]:
    """While this context lasts, ``loader`` is at its last batch. The session found the end by
    asking for one more batch, which ended the loader."""
    if not isinstance(loader, DataLoaderStateMixin):
        yield
        return
    loader.begin()
    loader.end_of_dataloader = True
    try:
        yield
    finally:
        loader.end()


def refuse_switching(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers that change all parameters for an evaluation, as schedule-free ones do: if
    a rank is lost there, training would go on with the parameters of the evaluation.

    Raises:
        ValueError: one of these ``optimizers`` of an accelerator does so.
    """
    for each in optimizers:
        inner = getattr(each, "optimizer", each)
        if callable(getattr(inner, "eval", None)):
            raise ValueError(
                f"tmd does not support {type(inner).__name__}, whose eval() changes all parameters"
            )


def begin_step(accelerator: Accelerator) -> None:
    """Clear the mark that a broken step leaves on its optimizers: with it, an overflow in the next
    step would go unnoticed."""
    for each in accelerator._optimizers:
        each._accelerate_step_called = False


def microbatches(accelerator: Accelerator, model: Any, drawn: Iterable[T]) -> Iterator[T]:
    """Yields the batches of one step; gradients are summed over the ranks with the last one.

    Use inside ``session.step()`` instead of ``accelerator.accumulate(model)``, whose own count goes
    on when a step is repeated. Only the last batch of the data is the end of its loader.
    """
    kept, state = list(drawn), accelerator.gradient_state
    loader, ends = state.active_dataloader, state.end_of_dataloader
    try:
        for batch in kept[:-1]:
            state._set_sync_gradients(False)
            if ends:
                loader.end_of_dataloader = False  # it has drawn the last batch of the step
            with accelerator.no_sync(model):
                yield batch
    finally:
        state._set_sync_gradients(True)
        if ends:
            loader.end_of_dataloader = True
    yield from kept[-1:]


def repeatable(
    session: Session, function: Callable[[], T], then: Callable[[T], object] | None = None
) -> Callable[[], None]:
    """As :meth:`tmd.trainer.Session.repeatable`, for a ``function`` that asks an accelerator.

    In it, iterate over ``session.placed(loader)`` for a prepared ``loader``: it sets the shard and
    the order of this evaluation.
    """

    def run() -> T:
        _follow(session)
        return function()

    return session.repeatable(run, then, getattr(function, "__name__", "evaluation"))


def _follow(session: Session) -> None:
    # An accelerator asks a copy.
    PartialState().process_index = AcceleratorState().process_index = session.rank


# --- trackers -------------------------------------------------------------------------------------

_tracked: WeakKeyDictionary[Accelerator, tuple[tuple[Any, ...], dict[str, Any]]] = (
    WeakKeyDictionary()
)
"""Accelerator -> the arguments with which the script has asked for trackers."""


def _follow_with_trackers() -> None:
    """Let the worker that takes rank 0 make the trackers: Accelerate makes them only in the process
    that is the main one when the script asks for them."""
    make = Accelerator.init_trackers

    @functools.wraps(make)
    def init_trackers(self: Accelerator, *args: Any, **named: Any) -> None:
        session = joined()
        if session is None:
            make(self, *args, **named)
            return
        if self not in _tracked:
            session.on_handover(partial(_end_trackers, self))
        _tracked[self] = args, named
        if not session.shadowing:
            make(self, *args, **named)

    Accelerator.init_trackers = init_trackers
    for name in ("log", "get_tracker"):
        setattr(Accelerator, name, _with_trackers(getattr(Accelerator, name), make))


def _with_trackers(method: Callable[..., T], make: Callable[..., object]) -> Callable[..., T]:
    @functools.wraps(method)
    def wrapped(self: Accelerator, *args: Any, **named: Any) -> T:
        session = joined()
        counts = session is not None and not session.shadowing
        if counts and self.is_main_process and not self.trackers and self in _tracked:
            _make_trackers(self, make)
        return method(self, *args, **named)

    return wrapped


def _make_trackers(accelerator: Accelerator, make: Callable[..., object]) -> None:
    """Make each by itself. One that fails is left out: the next worker would not fare better."""
    given, named = _tracked[accelerator]
    wanted, made = accelerator.log_with, []
    with generators_kept():
        for each in wanted:
            accelerator.log_with, accelerator.trackers = [each], []
            try:
                make(accelerator, *given, **named)
                made += accelerator.trackers
            except Exception:
                log.exception("nothing is logged to the tracker %s: it cannot be made here", each)
                _end_trackers(accelerator)
    accelerator.log_with, accelerator.trackers = wanted, made
    if not made:
        del _tracked[accelerator]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the random generators as they were: the script must draw what it would draw on a
    worker that makes no trackers."""
    states = random.getstate(), np.random.get_state()
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if cuda else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _end_trackers(accelerator: Accelerator) -> None:
    """Another worker makes its own now, and may go on with the same run."""
    trackers, accelerator.trackers = accelerator.trackers, []
    for tracker in trackers:
        try:
            tracker.finish()
        except Exception:
            log.exception("the tracker %s cannot be finished", tracker.name)


_follow_with_trackers()
