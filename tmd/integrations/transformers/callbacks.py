"""Calls of callbacks that may happen only once, though what leads to them is run again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from transformers.trainer_callback import CallbackHandler

log = logging.getLogger("tmd.trainer")


class HeldCall(NamedTuple):
    """A call that was kept back."""

    event: str
    state: Any
    """A copy of the state of the trainer at the time of the call."""
    more: dict[str, Any]


class HeldCallbacks(CallbackHandler):
    """Keeps back what may happen only once, while ``held`` is a list."""

    callbacks: list[Any]
    held: list[HeldCall] | None = None
    _unusable: tuple[Any, ...] = ()
    """Callbacks that could not begin on this worker."""
    _warned: frozenset[tuple[str, str, str]] = frozenset()
    """Callbacks, events and fields set in them, of which a user was warned."""

    def begin_again(self, *args: Any) -> None:
        """Call ``on_train_begin`` on a worker that takes rank 0: progress bars and reporters are
        made there only. A callback that fails is left out of ``on_log`` and ``on_save``: it would
        not fare better on the next worker."""
        for callback in list(self.callbacks):
            if hasattr(callback, "_initialized"):
                callback._initialized = False
            self._unusable = tuple(c for c in self._unusable if c is not callback)
            try:
                self._call_only([callback], "on_train_begin", *args)
            except Exception:
                name = type(callback).__name__
                log.exception("%s does not begin here: it gets no on_log and no on_save", name)
                self._unusable += (callback,)

    def call_event(self, event: str, *args: Any, **more: Any) -> Any:
        writes = event in ("on_log", "on_save")
        if not (self._unusable or (writes and self.held is not None)):
            return super().call_event(event, *args, **more)
        if not writes:
            return self._call_all(event, *args, **more)
        if self.held is None:
            return self._call_only(filter(self._can_write, self.callbacks), event, *args, **more)
        _, state, control = args
        copies = {name: copy.copy(value) for name, value in more.items()}
        self.held.append(HeldCall(event, copy.copy(state), copies))
        return control

    def release(self, event: str, *args: Any, **more: Any) -> None:
        """Call what was kept back. What it changes in the control object has no effect: what that
        decides has been voted on."""
        *others, control = args
        for callback in filter(self._can_write, list(self.callbacks)):
            after = self._call_only([callback], event, *others, copy.copy(control), **more)
            self._warn(type(callback).__name__, event, _changed(control, after))

    def _call_all(self, event: str, *args: Any, **more: Any) -> Any:
        """What a callback that could not begin sets in the control object counts all the same, as
        on other ranks, but its errors do not."""
        *others, control = args
        for callback in list(self.callbacks):
            try:
                control = self._call_only([callback], event, *others, control, **more)
            except Exception:
                if self._can_write(callback):
                    raise
                log.exception("%s fails in %s", type(callback).__name__, event)
        return control

    def _call_only(self, callbacks: Iterable[Any], event: str, *args: Any, **more: Any) -> Any:
        part = copy.copy(self)  # the list itself stays, since a callback may change it
        part.callbacks = list(callbacks)
        return CallbackHandler.call_event(part, event, *args, **more)

    def _can_write(self, callback: Any) -> bool:
        return not any(callback is each for each in self._unusable)

    def _warn(self, name: str, event: str, changed: str) -> None:
        if changed and (name, event, changed) not in self._warned:
            self._warned |= {(name, event, changed)}
            log.warning(
                "%s has set %s in %s, which has no effect: do so in on_step_end or on_evaluate",
                *(name, changed, event),
            )


def _changed(before: Any, after: Any) -> str:
    """The fields of a control object that a callback has set."""
    values = vars(before)
    return " and ".join(name for name, value in vars(after).items() if value != values.get(name))
