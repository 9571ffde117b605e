"""Calls of callbacks that may happen only once, though what leads to them is run again."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

from transformers.trainer_callback import CallbackHandler, TrainerCallback

log = logging.getLogger("tmd.trainer")


class HeldCall(NamedTuple):
    """A call that was kept back."""

    event: str
    state: Any
    """A copy of the state of the trainer at the time of the call."""
    more: dict[str, Any]


class HeldCallbacks(CallbackHandler):
    """Keeps back what may happen only once, while ``held`` is a list."""

    held: list[HeldCall] | None = None

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
        given = copy.copy(control)
        super().call_event(event, *others, given, **more)
        if changed := [name for name, value in vars(given).items() if value != vars(control)[name]]:
            log.warning(
                "%s set %s in %s, which has no effect: do so in on_step_end or on_evaluate",
                *(self._named(event), " and ".join(changed), event),
            )

    def _named(self, event: str) -> str:
        """The callbacks that act on ``event``."""
        inherited = getattr(TrainerCallback, event)
        kinds = {type(each) for each in self.callbacks}
        return " or ".join(
            sorted(k.__name__ for k in kinds if getattr(k, event, inherited) is not inherited)
        )
