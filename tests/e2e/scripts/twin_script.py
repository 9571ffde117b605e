"""The training script of the fault tests on a modelled device; training runs in a side stream."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.twin.device import Twin
from tmd.campaign import job


def main() -> None:
    twin = Twin()
    try:
        with twin.installed(), twin.training(), twin.stream("training"):
            job.main()
    finally:
        seen = twin.recorder
        facts = {"races": seen.races[:20], "ordered": seen.ordered, "staged": twin.staged}
        name = f"device-{os.environ['TMD_WORKER'].replace('/', '-')}.json"
        Path(os.environ["TMD_TRACE"], name).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
