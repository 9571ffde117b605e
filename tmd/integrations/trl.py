"""Trainers of TRL for supervised fine-tuning, preferences and rewards, on a session.

>>> from tmd.integrations.trl import SFTConfig, SFTTrainer

docs/start/transformers.md says what they support.
"""

from __future__ import annotations

from dataclasses import dataclass

try:
    import trl

    from tmd.integrations.transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ImportError(
        "tmd.integrations.trl needs trl: run pip install 'tmd-trainmover[trl]'"
    ) from error

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]

MOVED = ("_metrics", "_total_train_tokens")
"""What a trainer of TRL sums over the steps until it logs, and the tokens that it has seen."""


@dataclass(repr=False)
class SFTConfig(trl.SFTConfig, TrainingArguments):
    """As in TRL. Made first in a script: it joins the job of this process."""


@dataclass(repr=False)
class DPOConfig(trl.DPOConfig, TrainingArguments):
    """As in TRL. Made first in a script: it joins the job of this process."""


@dataclass(repr=False)
class RewardConfig(trl.RewardConfig, TrainingArguments):
    """As in TRL. Made first in a script: it joins the job of this process."""


class SFTTrainer(trl.SFTTrainer, Trainer):
    """As in TRL, but a standby can take over a rank while it trains."""

    moved_attributes = MOVED


class DPOTrainer(trl.DPOTrainer, Trainer):
    """As in TRL, but a standby can take over a rank while it trains."""

    moved_attributes = MOVED


class RewardTrainer(trl.RewardTrainer, Trainer):
    """As in TRL, but a standby can take over a rank while it trains."""

    moved_attributes = MOVED
