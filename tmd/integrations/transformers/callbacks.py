"""Calls of callbacks that may happen only once, though what leads to them is run again."""

from __future__ import annotations

import copy
import logging
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
    _warned: frozenset[tuple[str, str]] = frozenset()
    """Callbacks and events of which a user was warned."""

    def call_event(self, event: str, *args: Any, **more: Any) -> Any:
        if self.held is None or event not in ("on_log", "on_save"):
            return super().call_event(event, *args, **more)
        _, state, control = args
        copies = {name: copy.copy(value) for name, value in more.items()}
        self.held.append(HeldCall(event, copy.copy(state), copies))
        return control

    def release(self, event: str, *args: Any, **more: Any) -> None:
        """Call what was kept back. What it changes in the control object has no effect: what that
        decides has been voted on."""
        *others, control = args
        every = self.callbacks
        try:
            for each in every:
                self.callbacks = [each]
                after = super().call_event(event, *others, copy.copy(control), **more)
                self._warn(type(each).__name__, event, _changed(control, after))
        finally:
            self.callbacks = every

    def _warn(self, callback: str, event: str, changed: str) -> None:
        """Once for each callback and event."""
        if changed and (callback, event) not in self._warned:
            self._warned |= {(callback, event)}
            log.warning(
                "%s set %s in %s, which has no effect: do so in on_step_end or on_evaluate",
                *(callback, changed, event),
            )


def _changed(before: Any, after: Any) -> str:
    """The fields of a control object that a callback has set."""
    values = vars(before)
    return " and ".join(name for name, value in vars(after).items() if value != values.get(name))
