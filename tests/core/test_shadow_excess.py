"""Which outputs a link is too slow for."""

from __future__ import annotations

from tmd.core.values.shadows import excess, spares

LINK = 100e6
STEP = 2.0


def test_half_of_a_link_is_for_outputs() -> None:
    assert excess(100e6, 0, STEP, LINK) == ""
    assert excess(101e6, 0, STEP, LINK) == (
        "the 101 MB of outputs in a step of 2 s exceed half of the 100 MB/s of the link"
    )


def test_an_unknown_rate_forbids_nothing() -> None:
    assert excess(1e12, 0, STEP, 0.0) == ""


def test_an_unknown_step_forbids_nothing() -> None:
    assert excess(0.0, 0, 0.0, LINK) == ""


def test_gradients_of_more_than_half_spare_nothing() -> None:
    """As with DDP, whose outputs are the gradients."""
    assert spares(1000, 500)
    assert not spares(1000, 501)
    assert excess(1e12, 1e12, STEP, LINK) == ""
