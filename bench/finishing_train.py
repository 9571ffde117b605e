"""The demo's GPT, where each rank prepares to finish broken steps in some blocks of steps only."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from bench import gpt_job
from tmd.demo.train import GPT
from tmd.trainer.worker import wiring
from tmd.trainer.worker.continuation import Continuation


def prepares(step: int, block: int) -> bool:
    """Whether ``step`` is in a block in which ranks prepare. The blocks follow each other as ABBA,
    so that a steady drift of the step time hits both kinds alike."""
    return step // block % 4 in (0, 3)


class Alternating(Continuation):
    """Prepares in every second block, and writes down whether each step could have been finished,
    and the time of the processor that the rank has taken so far."""

    block = 1
    folder = Path()

    @property
    def _able(self) -> bool:
        return prepares(self._driver.step, self.block) and super()._able

    def voted(self, least: int) -> None:
        super().voted(least)
        status = self._reporter.status
        can_go_on, cpu_s = self._fabric.step.can_go_on, time.process_time()
        line = json.dumps({"step": status.step, "prepared": can_go_on, "cpu_s": cpu_s})
        with (self.folder / f"{status.rank}.jsonl").open("a") as file:
            file.write(f"{line}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", type=int, default=1, help="steps in a block")
    parser.add_argument("--notes", type=Path, help="folder for what each rank writes down")
    args = gpt_job.arguments(parser)
    Alternating.block, Alternating.folder = args.block, args.notes
    session, loader = gpt_job.begun(args)
    gpt = GPT(args.width, args.depth, args.heads, args.context)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with patch.object(wiring, "Continuation", Alternating):
        session.register(model=model, optimizer=optimizer)
    gpt_job.train(session, loader, model, optimizer)


if __name__ == "__main__":
    main()
