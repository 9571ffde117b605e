"""What lies between workers: by the kernel where it can be asked, by a relay where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tmd.campaign import namespaces
from tmd.campaign.faults.host import _networks
from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing
from tmd.campaign.relay import Weather
from tmd.campaign.scenario import FaultPart, Network
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until

DELAY_S = 0.02
SLOW_BYTES_S = 2e6
RATE = "16mbit"
LOST = 0.02
"""Share of the packets."""


def _ways(stage: CampaignStage, host: str, *, near: bool = True, far: bool = True) -> list[Weather]:
    """The ways of ``host`` that are in use: those that it dials, those on which it is dialled."""
    if stage.story.cluster.network is not Network.RELAYED:
        raise Unfired('workers do not go through the relay: [cluster] network = "relayed"')
    found = [
        weather
        for (dials, dialled), weather in stage.links.items()
        if (near and dials == host) or (far and dialled == host)
    ]
    if not found:
        raise Unfired(f"nobody has dialled {host} yet")
    return found


async def _met(ways: Iterable[Weather]) -> None:
    """Until something has really come that way."""
    known = list(ways)
    await until(lambda: any(weather.passed for weather in known))


def _clearing(ways: list[Weather]) -> Mend:
    async def clear() -> None:
        for weather in ways:
            weather.clear()

    return clear


async def _change(
    stage: CampaignStage, fault: FaultPart, change: Callable[[Weather], None]
) -> Mend:
    ways = _ways(stage, await stage.target(fault.where))
    for weather in ways:
        change(weather)
    await _met(ways)
    return _clearing(ways)


async def _delay(stage: CampaignStage, fault: FaultPart) -> Mend:
    def change(weather: Weather) -> None:
        weather.delay_s = fault.amount or DELAY_S

    return await _change(stage, fault, change)


async def _rate(stage: CampaignStage, fault: FaultPart) -> Mend:
    def change(weather: Weather) -> None:
        weather.bytes_s = fault.amount or SLOW_BYTES_S

    return await _change(stage, fault, change)


async def _stall(stage: CampaignStage, fault: FaultPart) -> Mend:
    def change(weather: Weather) -> None:
        weather.there.clear()
        weather.back.clear()

    return await _change(stage, fault, change)


async def _stall_one_way(stage: CampaignStage, fault: FaultPart) -> Mend:
    """What the host sends does not arrive; what is sent to it does."""
    host = await stage.target(fault.where)
    dials, dialled = _one_side(stage, host)
    for weather in dials:
        weather.there.clear()
    for weather in dialled:
        weather.back.clear()
    await _met([*dials, *dialled])
    return _clearing([*dials, *dialled])


def _one_side(stage: CampaignStage, host: str) -> tuple[list[Weather], list[Weather]]:
    every = _ways(stage, host)
    dials = [w for (near, _), w in stage.links.items() if near == host]
    return dials, [w for w in every if w not in dials]


async def _reset(stage: CampaignStage, fault: FaultPart) -> Mend:
    if not sum([w.reset() for w in _ways(stage, await stage.target(fault.where))]):
        raise Unfired("no connection was open")
    return nothing


async def _refuse(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Those that are open are reset, and no new one comes about."""
    ways = _ways(stage, await stage.target(fault.where))
    for weather in ways:
        weather.refuse = True
    if not sum([weather.reset() for weather in ways]):
        raise Unfired("no connection was open")
    return _clearing(ways)


async def _cut(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    networks.link(host, up=False)

    async def plug_in() -> None:
        networks.link(host, up=True)

    return plug_in


async def _cut_one_way(stage: CampaignStage, fault: FaultPart) -> Mend:
    """What the host sends to others gets lost; it hears them."""
    networks, host = _networks(stage), await stage.target(fault.where)
    peers = [h for h in stage.hosts if h != host]
    for peer in peers:
        networks.deafen(host, peer, deaf=True)

    async def restore() -> None:
        while peers:
            networks.deafen(host, peers.pop(), deaf=False)

    return restore


async def _slow_link(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    rate = f"{fault.amount:g}mbit" if fault.amount else RATE
    networks.slow(host, rate)
    return _once(lambda: networks.slow(host, ""))


async def _loss(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    networks.lose(host, fault.amount or LOST)
    await until(lambda: networks.lost(host) > 0)
    return _once(lambda: networks.lose(host, 0.0))


def _once(undo: Callable[[], None]) -> Mend:
    left = [undo]

    async def mend() -> None:
        while left:
            left.pop()()

    return mend


ROOT = namespaces.unable
KINDS = (
    FaultKind("network.sever", "one link is reset from inside the process", inside="sever"),
    FaultKind("network.shadow-cut", "the link on which a rank is followed breaks", inside="cut"),
    FaultKind("network.delay", "every piece of data comes late", _delay),
    FaultKind("network.trickle", "connections carry little", _rate),
    FaultKind("network.stall", "connections stand open and carry nothing", _stall),
    FaultKind("network.stall-one-way", "half-open: what the host sends stays away", _stall_one_way),
    FaultKind("network.reset", "all connections of a host are reset", _reset),
    FaultKind("network.refuse", "they are reset, and no new one comes about", _refuse),
    FaultKind("network.cut", "the cable is pulled", _cut, unable=ROOT),
    FaultKind("network.cut-one-way", "what the host sends gets lost", _cut_one_way, unable=ROOT),
    FaultKind("network.loss", "packets of a host get lost at random", _loss, unable=ROOT),
    FaultKind("network.slow-link", "the link of a host is slow (tc tbf)", _slow_link, unable=ROOT),
)
