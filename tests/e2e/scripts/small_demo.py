"""The demo's script with a small model, whose steps mostly wait while tmd is there.

The demo's own model keeps two cores busy for minutes. The waiting gives a standby time to start.
"""

import os
import sys
import time
from unittest.mock import patch

from torch import Tensor

from tmd.demo import train

PACE_S = 0.2
SMALL = ("--width", "32", "--depth", "1", "--heads", "2")


class Paced(train.GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        if "TMD_JOB" in os.environ:
            time.sleep(PACE_S)
        return super().forward(tokens)


if __name__ == "__main__":
    sys.argv += SMALL
    with patch.object(train, "GPT", Paced):
        train.main()
