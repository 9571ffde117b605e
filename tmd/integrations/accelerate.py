"""Hugging Face Accelerate: the loop around prepared objects (docs/start/accelerate.md).

>>> session = tmd.trainer.join()
>>> dist.init_process_group("tmd")
>>> accelerator = Accelerator(
...     dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
... )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
except ImportError as error:
    raise ImportError(
        "tmd.integrations.accelerate needs accelerate: run pip install 'tmd-trainmover[accelerate]'"
    ) from error

from tmd.trainer import Session

T = TypeVar("T")


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
        yield drawn if count > 1 else [drawn]


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
    on when a step is repeated.
    """
    kept = list(drawn)
    try:
        for batch in kept[:-1]:
            accelerator.gradient_state._set_sync_gradients(False)
            with accelerator.no_sync(model):
                yield batch
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
    yield from kept[-1:]


def repeatable(
    session: Session, function: Callable[[], T], then: Callable[[T], object] | None = None
) -> Callable[[], None]:
    """As :meth:`tmd.trainer.Session.repeatable`, for a ``function`` that asks an accelerator.

    In it, iterate over ``session.placed(loader)`` for a prepared ``loader``.
    """

    def run() -> T:
        _follow(session)
        return function()

    return session.repeatable(run, then, getattr(function, "__name__", "evaluation"))


def _follow(session: Session) -> None:
    # An accelerator asks a copy.
    PartialState().process_index = AcceleratorState().process_index = session.rank
