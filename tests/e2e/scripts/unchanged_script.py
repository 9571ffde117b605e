"""A script of transformers that has never heard of tmd."""

import argparse

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def rows(features: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    stacked = torch.stack([row for (row,) in features])
    return {"input_ids": stacked, "labels": stacked}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", required=True)
    own = parser.parse_args()
    args = TrainingArguments(
        own.out,
        max_steps=own.steps,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=7,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    set_seed(args.seed)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(32, (400, 16), generator=draw))
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=data,
        eval_dataset=TensorDataset(data.tensors[0][:10]),
        data_collator=rows,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
