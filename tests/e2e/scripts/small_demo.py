"""The demo's script with a small model, whose steps wait for the two events.

The demo's own model keeps two cores busy for minutes. The waiting gives a standby time to start.
"""

import sys
import time
from typing import Any

from torch import nn

from tmd.demo import train
from tmd.trainer.worker.join import joined

PACE_S, WAITS_S = 0.1, 1.0
EPOCHS = {25: 2, 45: 3}
"""The epoch that the job should be in from a step on: after the drain, and after the kill."""
SMALL = ("--width", "32", "--depth", "1", "--heads", "2")


def pace(module: nn.Module, _: Any) -> None:
    session = joined()
    if not isinstance(module, train.GPT) or session is None:
        return
    status = session._hooks.status
    waits = any(status.step > step and status.epoch < epoch for step, epoch in EPOCHS.items())
    time.sleep(WAITS_S if waits else PACE_S)


if __name__ == "__main__":
    sys.argv += SMALL
    nn.modules.module.register_module_forward_pre_hook(pace)
    train.main()
