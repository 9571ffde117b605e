"""Faults between workers: by the kernel where possible, else by a relay."""

from __future__ import annotations

from functools import partial

from tmd.campaign import namespaces
from tmd.campaign.faults.host import _networks
from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing, once
from tmd.campaign.relay import LinkConditions, LinkEffect
from tmd.campaign.scenario import FaultPart, Network
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until

DELAY_S = 0.02
SLOW_BYTES_S = 2e6
RATE = "250kbit"
LOST = 0.02
"""Share of dropped packets."""


def _connections(stage: CampaignStage, host: str) -> list[LinkConditions]:
    """Those of ``host`` in use, in both directions."""
    if stage.story.cluster.network is not Network.RELAYED:
        raise Unfired('workers do not use the relay: [cluster] network = "relayed"')
    if not (found := stage.links.of(host)):
        raise Unfired(f"no host has dialled {host} yet")
    return found


def _affect(stage: CampaignStage, effect: LinkEffect) -> Mend:
    """Begin ``effect``. Raises Unfired: the host has no connection."""
    _connections(stage, effect.host)
    stage.links.begin(effect)
    return _ending(stage, effect)


async def _bytes(stage: CampaignStage, fault: FaultPart) -> None:
    """Wait until bytes have met the effect."""
    known = _connections(stage, await stage.target(fault.where))
    await until(lambda: any(conditions.passed for conditions in known))


def _ending(stage: CampaignStage, effect: LinkEffect) -> Mend:
    async def end() -> None:
        stage.links.end(effect)

    return end


async def _delay(stage: CampaignStage, fault: FaultPart) -> Mend:
    def change(conditions: LinkConditions) -> None:
        conditions.delay_s = fault.amount or DELAY_S

    return _affect(stage, LinkEffect(await stage.target(fault.where), change, change))


async def _rate(stage: CampaignStage, fault: FaultPart) -> Mend:
    def change(conditions: LinkConditions) -> None:
        conditions.bytes_s = fault.amount or SLOW_BYTES_S

    return _affect(stage, LinkEffect(await stage.target(fault.where), change, change))


async def _stall(stage: CampaignStage, fault: FaultPart) -> Mend:
    stalls = LinkConditions.stall
    return _affect(stage, LinkEffect(await stage.target(fault.where), stalls, stalls))


async def _stall_one_way(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Data from the host do not arrive; data to it do."""
    host = await stage.target(fault.where)
    effect = LinkEffect(host, LinkConditions.stall_there, LinkConditions.stall_back)
    return _affect(stage, effect)


async def _reset(stage: CampaignStage, fault: FaultPart) -> Mend:
    if not sum([w.reset() for w in _connections(stage, await stage.target(fault.where))]):
        raise Unfired("no connection was open")
    return nothing


async def _refuse(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Open connections are reset, and new ones fail."""

    def change(conditions: LinkConditions) -> None:
        conditions.refuse = True

    host = await stage.target(fault.where)
    known, effect = _connections(stage, host), LinkEffect(host, change, change)
    stage.links.begin(effect)
    if not sum([conditions.reset() for conditions in known]):
        stage.links.end(effect)
        raise Unfired("no connection was open")
    return _ending(stage, effect)


async def _cut(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    networks.link(host, up=False)

    async def plug_in() -> None:
        networks.link(host, up=True)

    return plug_in


async def _cut_one_way(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Packets from the host are lost; packets to it arrive."""
    networks, host = _networks(stage), await stage.target(fault.where)
    peers = [h for h in stage.hosts if h != host]
    for peer in peers:
        networks.mute(host, peer, muted=True)
    return once(*(partial(networks.mute, host, peer, muted=False) for peer in peers))


async def _slow_link(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    rate = f"{fault.amount:g}mbit" if fault.amount else RATE
    networks.slow(host, rate)
    return once(partial(networks.slow, host, ""))


async def _loss(stage: CampaignStage, fault: FaultPart) -> Mend:
    networks, host = _networks(stage), await stage.target(fault.where)
    networks.drop_packets(host, fault.amount or LOST)
    return once(partial(networks.drop_packets, host, 0.0))


async def _delayed(stage: CampaignStage, fault: FaultPart) -> None:
    """Wait until a packet was delayed."""
    networks, host = _networks(stage), await stage.target(fault.where)
    await until(lambda: networks.delayed(host) > 0)


async def _dropped(stage: CampaignStage, fault: FaultPart) -> None:
    """Wait until a packet was lost."""
    networks, host = _networks(stage), await stage.target(fault.where)
    await until(lambda: networks.dropped(host) > 0)


ROOT = namespaces.unable
KINDS = (
    FaultKind("network.sever", "one link is reset from inside the process", inside="sever"),
    FaultKind("network.shadow-cut", "the link of a shadow breaks", inside="cut"),
    FaultKind("network.delay", "all data are delayed", _delay, _bytes),
    FaultKind("network.trickle", "connections are slow", _rate, _bytes),
    FaultKind("network.stall", "connections stay open but carry nothing", _stall, _bytes),
    FaultKind(
        "network.stall-one-way", "half-open: the host's data do not arrive", _stall_one_way, _bytes
    ),
    FaultKind("network.reset", "all connections of a host are reset", _reset),
    FaultKind("network.refuse", "all are reset, and new ones fail", _refuse),
    FaultKind("network.cut", "the cable is disconnected", _cut, unable=ROOT),
    FaultKind("network.cut-one-way", "packets from a host are lost", _cut_one_way, unable=ROOT),
    FaultKind("network.loss", "random packets of a host are lost", _loss, _dropped, unable=ROOT),
    FaultKind(
        "network.slow-link",
        "the link of a host is slow (tc tbf)",
        _slow_link,
        _delayed,
        unable=ROOT,
    ),
)
