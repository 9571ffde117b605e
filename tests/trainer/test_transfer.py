"""A joiner may hold the state already: both sides exchange digests, and nothing is copied."""

from __future__ import annotations

import threading

import pytest

from tests.fabric.circle import at_once
from tests.trainer.wire import PATIENCE, linked
from tmd.core.values.errors import LinkError
from tmd.trainer.state.digests import Digest
from tmd.trainer.state_transfer.stream import confirm, has_same

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("theirs", "same"), [("a", True), ("b", False)])
def test_both_sides_compute_their_digest_at_the_same_time(theirs: str, same: bool) -> None:
    """All others wait meanwhile. Neither call returns if it waits for the other side's first."""
    together = threading.Barrier(2)

    def own(of: str) -> Digest:
        together.wait(PATIENCE)
        return {"parameters": of}

    with linked() as (near, far):
        found = at_once(
            [
                lambda: confirm(near, lambda: own("a")),
                lambda: has_same(far, lambda: own(theirs)),
            ]
        )

    assert found == [same, same]


def test_a_joiner_that_dies_during_its_digest_is_reported() -> None:
    with linked() as (near, far):
        far.close()
        with pytest.raises(LinkError):
            confirm(near, dict)


def test_a_malformed_digest_is_refused() -> None:
    with linked() as (near, far):
        far.send_frame(b"\xc1")
        with pytest.raises(LinkError, match="does not speak this protocol"):
            confirm(near, dict)
