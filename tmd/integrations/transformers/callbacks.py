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
    _warned: frozenset[tuple[str, str, str]] = frozenset()
    """Callbacks, events and fields set in them, of which a user was warned."""

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
        for callback in list(self.callbacks):
            alone = copy.copy(self)  # the list itself stays, since a callback may change it
            alone.callbacks = [callback]
            after = CallbackHandler.call_event(alone, event, *others, copy.copy(control), **more)
            self._warn(type(callback).__name__, event, _changed(control, after))

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
