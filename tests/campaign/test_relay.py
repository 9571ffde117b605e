"""The relay between two sides: what it lets through, holds, and ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tmd.campaign.relay import LinkConditions, LinkEffect, Relay, RelayedLinks

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echoing(folder: Path, conditions: LinkConditions) -> AsyncIterator[Path]:
    """A door that leads to somebody who says everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_unix_server(echo, folder / "target")
    async with Relay() as relay:
        await relay.unix(folder / "door", folder / "target", conditions)
        yield folder / "door"
    server.close()


@asynccontextmanager
async def dialled(door: Path) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_unix_connection(door)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_fair_weather_lets_everything_through(tmp_path: Path) -> None:
    """Both ways, and the end too."""
    async with echoing(tmp_path, LinkConditions()) as door, dialled(door) as (reader, writer):
        writer.write(b"hello")
        writer.write_eof()

        assert await reader.read() == b"hello"


@pytest.mark.parametrize("way", ["flows_there", "flows_back"])
async def test_what_is_held_comes_once_the_weather_clears(way: str, tmp_path: Path) -> None:
    """A stall loses nothing; that something was held can be seen."""
    conditions = LinkConditions()
    getattr(conditions, way).clear()
    async with echoing(tmp_path, conditions) as door, dialled(door) as (reader, writer):
        writer.write(b"hello")
        while not conditions.passed:  # noqa: ASYNC110 (the relay counts)
            await asyncio.sleep(0)
        answer = asyncio.ensure_future(reader.readexactly(5))
        await asyncio.sleep(0)
        held = not answer.done()
        conditions.clear()

        assert held
        assert await answer == b"hello"


async def test_an_effect_on_a_host_meets_links_that_are_opened_later(tmp_path: Path) -> None:
    """A standby dials the host for the first time during the fault."""

    def refuse(conditions: LinkConditions) -> None:
        conditions.refuse = True

    def slow_down(conditions: LinkConditions) -> None:
        conditions.delay_s = 9.0

    links, effect = RelayedLinks(), LinkEffect("h1", refuse, slow_down)
    early = links.between("h1", "h2")
    links.begin(effect)
    late, other = links.between("h3", "h1"), links.between("h2", "h3")
    during = [(each.refuse, each.delay_s) for each in (early, late, other)]
    links.end(effect)
    after = [(each.refuse, each.delay_s) for each in (early, late, links.between("h1", "h4"))]

    assert during == [(True, 0.0), (False, 9.0), (False, 0.0)]
    assert after == [(False, 0.0)] * 3
    assert links.between("h3", "h1") is late
    assert links.of("h4") == [links.between("h1", "h4")]


async def test_a_reset_ends_what_is_open_and_refusal_what_comes(tmp_path: Path) -> None:
    """Until it clears."""
    conditions = LinkConditions()
    async with echoing(tmp_path, conditions) as door:
        async with dialled(door) as (reader, writer):
            writer.write(b"hello")
            await reader.readexactly(5)
            conditions.refuse = True
            ended = conditions.reset()

            assert ended == 2
            assert await reader.read() == b""
        async with dialled(door) as (reader, _):
            assert await reader.read() == b""
        conditions.clear()
        async with dialled(door) as (reader, writer):
            writer.write(b"again")

            assert await reader.readexactly(5) == b"again"


async def test_what_is_relayed_may_listen_on_a_port(tmp_path: Path) -> None:
    """As the Redis does that lives in the process of a campaign."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Relay() as relay:
        await relay.unix(tmp_path / "door", f"127.0.0.1:{port}", LinkConditions())
        async with dialled(tmp_path / "door") as (reader, writer):
            writer.write(b"hello")

            assert await reader.read() == b"hello"
    server.close()


async def test_a_question_is_answered(tmp_path: Path) -> None:
    """One line each."""

    async def answer(question: str) -> str:
        return question.upper()

    async with Relay() as relay:
        await relay.answering(tmp_path / "ports", answer)
        async with dialled(tmp_path / "ports") as (reader, writer):
            writer.write(b"where to\n")

            assert await reader.read() == b"WHERE TO\n"
