"""The demo's script with a small model, whose steps mostly wait while tmd is there.

The demo's own model keeps two cores busy for minutes. The waiting gives a standby time to start.
"""

import os
import sys
import time
from typing import Any

from torch import nn

from tmd.demo import train

PACE_S = 0.2
SMALL = ("--width", "32", "--depth", "1", "--heads", "2")


def pace(module: nn.Module, _: Any) -> None:
    if isinstance(module, train.GPT) and "TMD_JOB" in os.environ:
        time.sleep(PACE_S)


if __name__ == "__main__":
    sys.argv += SMALL
    nn.modules.module.register_module_forward_pre_hook(pace)
    train.main()
