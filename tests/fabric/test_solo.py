"""The addresses of ranks that find each other without a daemon."""

from __future__ import annotations

import pytest

from tests.marks import needs_ipv6
from tmd.core.values.model import Member
from tmd.fabric.solo import own_address, why_unreachable


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMD_ADVERTISE", raising=False)


def members(*addresses: str) -> list[Member]:
    return [Member(f"w{n}", f"host-{n}", each) for n, each in enumerate(addresses)]


@pytest.mark.parametrize(
    "master", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "no such name"]
)
def test_the_address_is_that_on_the_route_to_the_store(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_address() == ("::1" if master == "::1" else "127.0.0.1")


def test_a_given_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMD_ADVERTISE", "10.0.0.7")
    assert own_address() == "10.0.0.7"


@pytest.mark.parametrize("local", ["127.0.1.1:7000", "::1:7000"])
def test_a_rank_that_other_hosts_cannot_reach_is_named(local: str) -> None:
    """Debian resolves the name of a host to the loopback interface on that host."""
    why = why_unreachable(members("10.0.0.7:7000", local))

    assert why.startswith(f"rank 1 on host-1 has the address {local}, ")
    assert "Set TMD_ADVERTISE on each host" in why


@pytest.mark.parametrize(
    "addresses",
    [("127.0.0.1:1", "127.0.0.1:2"), ("10.0.0.7:1", "10.0.0.8:1"), ("node-1:1", "fd00::2:1")],
)
def test_addresses_of_one_kind_are_taken_for_reachable(addresses: tuple[str, ...]) -> None:
    """All on the loopback interface: they have found each other there."""
    assert why_unreachable(members(*addresses)) == ""
