"""The trace of committed steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tmd.testing.clients import worker_status
from tmd.trainer.session.trace import FileTrace


def test_a_full_disk_ends_the_trace_and_not_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is committed by then, and its rank must not be lost for a line of a log."""
    status = structs.replace(worker_status("h1/job/0.a"), step=4)
    (tmp_path / "h1_job_0.a.jsonl").symlink_to("/dev/full")
    trace = FileTrace(tmp_path, status.worker)
    for _ in range(3):
        trace.begun()
        trace.write(lambda: status, {0: 1.5})
        trace.undone(status)

    assert caplog.text.count("ends here: No space left on device") == 1
