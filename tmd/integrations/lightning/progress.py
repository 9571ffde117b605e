"""What Lightning keeps between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor

from tmd.core.values.reasons import in_words
from tmd.integrations.epoch import refuse_rest
from tmd.integrations.lightning.refused import callback_keys, monitors, refuse_unreduced

log = logging.getLogger("tmd.trainer")

MANY = 65_536
"""Elements of a tensor in the state of a callback, beyond which a step takes longer."""
UNSAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ``ModelCheckpoint`` that its own state lacks."""


class LoopProgress:
    """Counters of the loops, states of the callbacks and metrics; moves with a rank."""

    def __init__(self, trainer: Trainer, loop: _FitLoop) -> None:
        self._trainer, self._loop = trainer, loop
        self._first = loop.state_dict()
        self.began = 0
        """The epoch in which training began: that after the checkpoint of Lightning, if any."""
        self.pending = False
        """Whether the latest step awaits what is done between two steps."""
        self.last = False
        """Whether it is the last one of its epoch."""
        self.runs = 0
        """How often the work between two steps has been done."""
        self._metrics: dict[str, Tensor] = {}
        self._named: set[int] = set()
        """Ids of the callbacks that the session keeps."""
        self._warned: set[str] = set()
        """Callbacks that a user was warned of."""

    def leave_out(self, named: Iterable[object]) -> None:
        """Leave callbacks that are among ``named`` to the session, which keeps their tensors."""
        self._named = {id(each) for each in named}

    def keep_metrics(self) -> None:
        """Keep what validation has found and what a callback monitors: they use it later, too."""
        found = self._trainer._logger_connector._callback_metrics
        loop = self._loop.epoch_loop
        names = monitors(self._trainer) | self._metrics.keys()
        validated = loop.val_loop._results
        for results in (validated, loop._results):
            refuse_unreduced(self._trainer, results)
        names |= {key for each in validated.values() for key in callback_keys(validated, each)}
        self._metrics = {name: found[name] for name in sorted(names & found.keys())}

    def forget_checkpoint(self) -> None:
        """Count from the first epoch again, although a checkpoint was loaded."""
        _load(self._loop, self._first)

    def state_dict(self) -> dict[str, Any]:
        loops = self._loop.state_dict()
        loops["state_dict"] = {}  # of loaders, whose position is the session's
        # Also one whose state is empty now: it may have had another one in a step that broke.
        own = (c for c in self._trainer.callbacks if id(c) not in self._named and _has_state(c))
        callbacks = {c.state_key: _state_of(c) for c in own}
        return {
            "loops": loops,
            "callbacks": {
                key: _plain(value, partial(self._warn_of_large, key))
                for key, value in callbacks.items()
            },
            "metrics": _plain(self._metrics),
            "pending": self.pending,
            "last": self.last,
            "runs": self.runs,
            "should_stop": self._trainer.should_stop,
            "limit": self._loop.max_steps,
            "within": self._loop.ended_within_epoch,
            "began": self.began,
        }

    def _empty(self, callback: Callback | None) -> None:
        """Give ``callback`` an empty state, which Lightning never does."""
        if callback is None or not callback.state_dict():
            return
        try:
            callback.load_state_dict({})
        except Exception as error:
            name = type(callback).__name__
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "%s.load_state_dict() does not take an empty state (%s): it keeps what a step "
                    "that is repeated has added",
                    *(name, in_words(error)),
                )

    def _warn_of_large(self, key: str, tensor: Tensor) -> None:
        if tensor.numel() > MANY and key not in self._warned:
            self._warned.add(key)
            log.warning(
                "%s has a tensor of %d elements in its state_dict(), which becomes a list of "
                "numbers in each step: name the callback in TmdStrategy(state=...)",
                *(key, tensor.numel()),
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        limit, now = state["limit"], self._loop.max_steps
        if state["within"] and not -1 < now <= limit:
            refuse_rest(limit)
        _load(self._loop, state["loops"])
        self.began = state.get("began", self.began)  # not in checkpoints of 0.1.0
        known = {c.state_key: c for c in self._trainer.callbacks}
        for key, value in _restored(state["callbacks"]).items():
            if not value:
                self._empty(known.get(key))
            elif isinstance(known[key], ModelCheckpoint):
                vars(known[key]).update(value)  # its own method keeps its folder, not the rank's
            else:
                known[key].load_state_dict(value)
        self._loop.epoch_loop._results.reset()  # else values of a step before come first
        self._metrics = _restored(state["metrics"])
        self._trainer._logger_connector._callback_metrics.update(self._metrics)
        self.pending, self.last = state["pending"], state["last"]
        self.runs = state.get("runs", 0)  # not in checkpoints of 0.1.0
        self._trainer.should_stop = state["should_stop"]


def _has_state(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict


def _state_of(callback: Any) -> dict[str, Any]:
    state = dict(callback.state_dict())
    if isinstance(callback, ModelCheckpoint):
        state |= {name: getattr(callback, name) for name in UNSAVED if hasattr(callback, name)}
    return state


def _load(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Set the counters. ``load_state_dict`` would also mark the loops as restarting."""
    loop._load_from_state_dict(state, prefix)
    for name, child in vars(loop).items():
        if isinstance(child, _Loop):
            _load(child, state, f"{prefix}{name}.")


def _plain(value: Any, look: Callable[[Tensor], None] | None = None) -> Any:
    """``value`` with tensors as plain values: their number may change from step to step. ``look``
    is called with each of them."""
    if isinstance(value, Tensor):
        if look is not None:
            look(value)
        dtype = str(value.dtype).removeprefix("torch.")
        shape = list(value.shape)
        return {"tensor": value.detach().cpu().tolist(), "dtype": dtype, "shape": shape}
    if isinstance(value, dict):
        return {name: _plain(item, look) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_plain(item, look) for item in value])
    return value


def _restored(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict):
        if value.keys() - {"shape"} == {"tensor", "dtype"}:
            made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
            return made.reshape(value.get("shape", made.shape))  # not in checkpoints of 0.1.0
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_restored(item) for item in value])
    return value


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """``items`` in a list or tuple of the same type, which may be a named tuple."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
