"""The same script without a daemon: plain python and plain torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from tmd.demo import train
from tmd.demo.report import DemoTrace, read_trace

SMALL = (train.__file__, "--steps", "4", "--width", "32", "--depth", "1", "--heads", "2")


def run(folder: Path, *launcher: str) -> tuple[DemoTrace, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TMD_")}
    environment |= {"TMD_TRACE": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (sys.executable, *launcher, *SMALL),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_trace(folder), done.stdout + done.stderr


def test_plain_python_trains_as_a_world_of_one(tmp_path: Path) -> None:
    """It warns once that nothing protects it."""
    trace, output = run(tmp_path)

    assert sorted(trace.commits) == [(0, step) for step in range(4)]
    assert output.count("training without a tmd daemon and its protection") == 1


def test_torchrun_gives_the_same_numbers_twice(tmp_path: Path) -> None:
    """Two runs of two ranks are bit for bit the same."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    first, output = run(tmp_path / "1", *torchrun)
    second, _ = run(tmp_path / "2", *torchrun)

    assert first.ranks == [0, 1]
    assert {k: v["loss"] for k, v in first.commits.items()} == {
        k: v["loss"] for k, v in second.commits.items()
    }
    assert output.count("training without a tmd daemon and its protection") == 1
