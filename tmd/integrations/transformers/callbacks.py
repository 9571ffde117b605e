"""Calls of callbacks that may happen only once, though what leads to them is run again."""

from __future__ import annotations

import copy
from typing import Any

from transformers.trainer_callback import CallbackHandler


class Callbacks(CallbackHandler):
    """Keeps back what may happen only once, while ``held`` is a list."""

    held: list[tuple[str, dict[str, Any]]] | None = None

    def call_event(self, event: str, *args: Any, **more: Any) -> Any:
        if self.held is None or event not in ("on_log", "on_save"):
            return super().call_event(event, *args, **more)
        self.held.append((event, {name: copy.copy(value) for name, value in more.items()}))
        return args[2]

    def release(self, event: str, *args: Any, **more: Any) -> None:
        """Call what was kept back. What it changes in the control object has no effect."""
        *others, control = args
        super().call_event(event, *others, copy.copy(control), **more)
