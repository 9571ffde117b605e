"""A Lightning script that trains with one ``Trainer`` and tests with another one, then joins again,
which only a script of tmd would do."""

import os
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import tmd.trainer

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def main() -> None:
    trainer = L.Trainer(max_steps=4, limit_val_batches=0, **QUIET)
    tester = L.Trainer(devices=1, **QUIET)
    model = BoringModel()
    trainer.fit(model)
    lines = [f"{trainer.global_step} steps, {len(tester.test(model))} test"]
    for again in (lambda: L.Trainer(max_steps=4, **QUIET).fit(model), tmd.trainer.join):
        try:
            again()
        except RuntimeError as error:
            lines.append(str(error))
    Path(os.environ["TMD_TRACE"], "lines").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
