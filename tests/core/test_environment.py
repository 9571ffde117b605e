"""The environment variables of a worker that holds a rank."""

from tmd.core.values.environment import of_rank


def test_hosts_count_in_the_order_of_their_ranks() -> None:
    """Ranks alternate between two hosts."""
    hosts = ("b", "a", "b", "a")

    assert [of_rank(rank, hosts)["GROUP_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert of_rank(3, hosts)["GROUP_WORLD_SIZE"] == "2"
    assert of_rank(3, hosts)["WORLD_SIZE"] == "4"
