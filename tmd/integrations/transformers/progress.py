"""The state of a trainer that moves with a rank, besides model, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState

from tmd.integrations.epoch import refuse_rest
from tmd.integrations.transformers.attributes import packed, unpacked

STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
CONTROL = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)
OWN = ("_total_loss_scalar", "_globalstep_last_logged")
BEGUN_STATE = ("logging_steps", "eval_steps", "save_steps")
BEGUN_OWN = ("_initial_global_step", "_initial_num_input_tokens_seen")
"""Attributes whose values come from the checkpoint-N that the job resumed from."""


class Tally(nn.Module):
    """Numbers that differ by rank: buffers, which tmd copies to other hosts before each vote."""

    loss: Tensor
    flos: Tensor
    grad_norm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loss", torch.zeros(()))
        self.register_buffer("flos", torch.zeros((), dtype=torch.float64))
        self.register_buffer("grad_norm", torch.zeros(()))


class TrainerProgress:
    """The state of a trainer that a step changes and that is equal on all ranks.

    ``begun``: the checkpoint-N from which training began. Positions within the first epoch are
    counted from it. ``late``: this worker learns from the state that it loads where training began.
    That is so for a standby, and for a worker that resumes from the newest checkpoint.
    """

    def __init__(self, trainer: Any, begun: str, *, late: bool) -> None:
        self._trainer, self._begun, self._late = trainer, begun, late
        self._first, self._left_out = 0, 0
        """The epoch in which training began, and how many batches of it the checkpoint-N covers."""
        self.values: dict[str, Any] = {"learning_rate": None, "done": 0, "epoch": -1, "gaps": 0}
        """``done``: batches of ``epoch`` that were trained on. ``gaps``: how often
        `Trainer._measure` has run. ``evaluated``, once it is known: whether it has evaluated since
        the last step."""
        self.stopped: list[int] = []
        """The epoch that ended early, and after how many batches."""

    def set_start(self, epoch: int, left_out: int) -> None:
        """Training begins in ``epoch``, after its first ``left_out`` batches."""
        self._first, self._left_out = epoch, left_out

    def is_past(self, epoch: int) -> bool:
        """Whether training began after ``epoch``."""
        return epoch < self._first

    def left_out(self, epoch: int) -> int:
        """How many batches of ``epoch`` the checkpoint-N from which training began covers."""
        return self._left_out if epoch == self._first else 0

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def _named(self) -> list[tuple[str, Any]]:
        """The exportable callbacks by name. A Trainer that restores them from a checkpoint-N
        reorders them."""
        named = [(type(each).__name__, each) for each in self._exportable()]
        return sorted(named, key=lambda each: each[0])

    def state_dict(self) -> dict[str, Any]:
        trainer, named = self._trainer, self._named()
        exported = [each.state() for _, each in named]
        restored = trainer.args.restore_callback_states_from_checkpoint
        return {
            "begun": self._begun,
            "first": self._first,
            "left_out": self._left_out,
            "limit": trainer.state.max_steps,
            "steps_in_epoch": self._steps_in_epoch,
            "values": dict(self.values),
            "stopped": list(self.stopped),
            "own": {name: getattr(trainer, name) for name in OWN},
            "moved": {name: packed(getattr(trainer, name)) for name in trainer.moved_attributes},
            "state": {name: getattr(trainer.state, name) for name in STATE},
            "begun_own": {name: getattr(trainer, name) for name in BEGUN_OWN},
            "begun_state": {name: getattr(trainer.state, name) for name in BEGUN_STATE},
            "control": {name: getattr(trainer.control, name) for name in CONTROL},
            "callbacks": [each["attributes"] for each in exported],
            "names": [name for name, _ in named],
            "arguments": [each["args"] for each in exported if restored],
        }

    @property
    def _steps_in_epoch(self) -> int:
        return int(self._trainer._run.get("steps_in_epoch", 0))

    def _goes_on(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` was saved at the end of a job with fewer steps than this one.

        Raises:
            RuntimeError: it ended within an epoch.
        """
        steps, limit = self._trainer.state.max_steps, state["limit"]
        if not limit <= state["state"]["global_step"] < steps:
            return False
        length = state["steps_in_epoch"]
        if state["values"]["done"] < length or length != self._steps_in_epoch:
            refuse_rest(limit)
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin_like(state)
        trainer, goes_on = self._trainer, self._goes_on(state)
        self.values, self.stopped = dict(state["values"]), list(state["stopped"])
        parts = ((trainer, "own"), (trainer.state, "state"), (trainer.control, "control"))
        changes = [(owner, state[name]) for owner, name in parts]
        named = [each for _, each in self._named()]
        callbacks = named if "names" in state else self._exportable()  # 0.1.0 kept no names
        changes += zip(callbacks, state["callbacks"], strict=True)
        for owner, values in changes:
            for name, value in values.items():
                setattr(owner, name, value)
        for name, value in state.get("moved", {}).items():  # 0.1.0 kept none
            setattr(trainer, name, unpacked(value, getattr(trainer, name)))
        if goes_on:
            trainer.control.should_training_stop, self.stopped = False, []

    def _begin_like(self, state: dict[str, Any]) -> None:
        """Begin where the job in ``state`` began.

        Raises:
            RuntimeError: the session checkpoint belongs to a job that began with another
                checkpoint-N.
        """
        if self._late:
            self._begun = state["begun"]
            for owner, part in ((self._trainer, "begun_own"), (self._trainer.state, "begun_state")):
                for name, value in state[part].items():
                    setattr(owner, name, value)
            for (_, each), arguments in zip(self._named(), state["arguments"], strict=False):
                if each.state()["args"] != arguments:
                    vars(each).update(vars(type(each)(**arguments)))
        elif state["begun"] != self._begun:
            began = (
                f"resume_from_checkpoint={state['begun']!r}" if state["begun"] else "no checkpoint"
            )
            raise RuntimeError(
                f"the session checkpoint belongs to a job that began with {began}: begin with the "
                "same to continue it, or choose a new output_dir or session_checkpoints"
            )
        if "first" in state:  # 0.1.0 did not keep it
            self.set_start(state["first"], state["left_out"])
