"""Which outputs a link is too slow for."""

from __future__ import annotations

from tmd.core.values.shadows import excess


def test_half_of_a_link_is_for_outputs() -> None:
    assert excess(outputs=50e6, rate=100e6) == ""
    assert excess(outputs=50.1e6, rate=100e6) == (
        "its collectives give 50 MB/s, more than half of the 100 MB/s of the link"
    )


def test_an_unknown_rate_forbids_nothing() -> None:
    assert excess(outputs=1e12, rate=0.0) == ""


def test_a_rank_without_collectives_fits_any_link() -> None:
    assert excess(outputs=0.0, rate=1.0) == ""
