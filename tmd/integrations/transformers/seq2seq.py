"""The trainer of transformers that generates text when it evaluates."""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from tmd.integrations.transformers.arguments import TrainingArguments
from tmd.integrations.transformers.trainer import Trainer


@dataclass(repr=False)
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments, TrainingArguments):
    """As in transformers. Made first in a script: it joins the job of this process."""


class Seq2SeqTrainer(transformers.Seq2SeqTrainer, Trainer):
    """As in transformers, but a standby can take over a rank while it trains."""
