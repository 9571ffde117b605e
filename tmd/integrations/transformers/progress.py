"""The state of a trainer that moves with a rank, besides model, optimizer and scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState

from tmd.integrations.epoch import refuse_rest

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


class Progress:
    """What else a step changes in a trainer, equal on all ranks.

    ``begun``: the checkpoint-N from which training began. Epochs and batches are counted from it.
    """

    def __init__(self, trainer: Any, begun: str) -> None:
        self._trainer, self._begun = trainer, begun
        self.values: dict[str, Any] = {"learning_rate": None, "done": 0, "epoch": -1, "gaps": 0}
        """``done``: batches of ``epoch`` that were trained on. ``gaps``: see `Trainer._measure`."""
        self.stopped: list[int] = []
        """The epoch that ended early, and after how many batches."""

    def _exportable(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "begun": self._begun,
            "limit": trainer.state.max_steps,
            "steps_in_epoch": self._steps_in_epoch,
            "values": dict(self.values),
            "stopped": list(self.stopped),
            "own": {name: getattr(trainer, name) for name in OWN},
            "state": {name: getattr(trainer.state, name) for name in STATE},
            "control": {name: getattr(trainer.control, name) for name in CONTROL},
            "callbacks": [each.state()["attributes"] for each in self._exportable()],
        }

    @property
    def _steps_in_epoch(self) -> int:
        return int(self._trainer._run.get("steps_in_epoch", 0))

    def _goes_on(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is of the end of a job that had fewer steps to make than this one.

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
        if state["begun"] != self._begun:
            began = (
                f"resume_from_checkpoint={state['begun']!r}" if state["begun"] else "no checkpoint"
            )
            raise RuntimeError(
                f"the session checkpoint is of a job that began with {began}: begin so again to go "
                "on from it, or choose a new output_dir or session_checkpoints"
            )
        trainer, goes_on = self._trainer, self._goes_on(state)
        self.values, self.stopped = dict(state["values"]), list(state["stopped"])
        parts = ((trainer, "own"), (trainer.state, "state"), (trainer.control, "control"))
        changes = [(owner, state[name]) for owner, name in parts]
        changes += zip(self._exportable(), state["callbacks"], strict=True)
        for owner, values in changes:
            for name, value in values.items():
                setattr(owner, name, value)
        if goes_on:
            trainer.control.should_training_stop, self.stopped = False, []
