"""Trainers of Hugging Face transformers and their arguments, on a session.

>>> from tmd.integrations.transformers import Trainer, TrainingArguments

docs/start/transformers.md says what they support. ``trainer`` has the loop, ``checkpoints`` the
folders checkpoint-N, ``progress`` the state that moves with a rank, ``attributes`` what a class
that builds on the trainer adds to it.
"""

try:
    from tmd.integrations.transformers.arguments import TrainingArguments, session
    from tmd.integrations.transformers.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from tmd.integrations.transformers.trainer import Trainer
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "transformers"):
        raise
    raise ImportError(
        f"tmd.integrations.transformers needs {error.name}: "
        "run pip install 'tmd-trainmover[transformers]'"
    ) from error

__all__ = [
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "session",
]
