"""A script of TRL as its users write it: low-rank adapters of a model are tuned. Only the import of
the trainer is changed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.e2e.scripts.transformers_script import CLOCK, Watch, injector
from tmd.integrations.transformers import session
from tmd.integrations.trl import SFTConfig, SFTTrainer
from tmd.trainer.state.digests import digest_of

WORDS, LENGTH, ROWS = 32, 12, 400


def texts() -> Dataset:
    """Sentences of words that count up, each from a random one."""
    starts = torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [" ".join(f"w{(n + at) % WORDS}" for at in range(5 + n % 7)) for n in starts]
    return Dataset.from_dict({"text": rows})


def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<end>": WORDS, **{f"w{n}": n for n in range(WORDS)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<end>"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    folder = Path(os.environ["TMD_TRACE"])
    args = SFTConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        max_steps=options.steps,
        max_length=LENGTH,
        packing=True,
        packing_strategy="wrapped",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=12,
        load_best_model_at_end=True,
        metric_for_best_model="eval_mean_token_accuracy",
        report_to="none",
    )
    injector.follow(session())
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS + 1, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    data = texts().train_test_split(0.1, seed=0)
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=words(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1),
        callbacks=[Watch(folder, writes=lambda name: not name.endswith(CLOCK))],
    )
    trainer.train()
    digest = digest_of([*trainer.model.parameters()])
    (folder / f"weights-{session().rank}").write_text(digest)


if __name__ == "__main__":
    main()
