"""Plays stories one after the other and holds what was seen against what was expected."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, structs

from tmd.campaign.costs import Cost, costs_of
from tmd.campaign.faults import KINDS
from tmd.campaign.forking import fork_server
from tmd.campaign.judge import Observed, deviations, late_decisions
from tmd.campaign.oracle import Oracle, differences, read_run, repeated
from tmd.campaign.play import Play
from tmd.campaign.scenario import Network, Scenario, Server, Story
from tmd.campaign.stage import TTL_S, Stage
from tmd.demo.report import Trace

END_S = 120.0
"""Longest time from the last scenario to the end of the job, and as much for each 1000 steps."""


class Result(Struct, frozen=True):
    """One scenario, played once."""

    story: str
    scenario: Scenario
    seen: Observed
    deviations: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()


class Ending(Struct, frozen=True):
    """How the job of one cluster ended."""

    story: str
    steps: int
    deviations: tuple[str, ...]
    seconds: float


class Outcome(Struct, frozen=True):
    """A whole campaign."""

    results: tuple[Result, ...]
    endings: tuple[Ending, ...]
    seconds: float

    @property
    def well(self) -> bool:
        ends = [ending.deviations for ending in self.endings]
        return not any([*ends, *(result.deviations for result in self.results)])


class Audience(Protocol):
    """Who is told as it goes on."""

    def begins(self, story: str, what: str) -> None: ...
    def ended(self, result: Result) -> None: ...


async def run(stories: Sequence[Story], audience: Audience) -> Outcome:
    """Play all of them. Whatever was started has ended when this returns, however it does."""
    began = time.monotonic()
    results: list[Result] = []
    endings: list[Ending] = []
    with tempfile.TemporaryDirectory(prefix="tmd-c-") as name, fork_server(compiler=False) as fork:
        oracle = Oracle(Path(name), fork)
        for number, story in enumerate(stories):
            rest = list(_repeats(story))
            part = 0
            while rest:
                folder = Path(name) / f"{number}{chr(ord('a') + part % 26)}{part // 26 or ''}"
                found, ending = await _Cluster(story, folder, fork, oracle, audience).play(rest)
                rest = rest[len(found) :]
                part += 1
                results += found
                endings += [ending] if ending else []
    results = _judged(stories, results)
    return Outcome(tuple(results), tuple(endings), time.monotonic() - began)


class _Cluster:
    """One cluster: plays scenarios until one has left it in pieces, or to the end of its job."""

    def __init__(
        self,
        story: Story,
        folder: Path,
        fork: Sequence[str],
        oracle: Oracle,
        audience: Audience,
    ) -> None:
        self._story, self._folder, self._fork = story, folder, fork
        self._oracle, self._audience = oracle, audience

    async def play(self, scenarios: Sequence[Scenario]) -> tuple[list[Result], Ending | None]:
        """Results of those that were played, at least one, and how the job ended."""
        story, began = self._story, time.monotonic()
        able = [s for s in scenarios if not why_not(story, s)]
        if not able:
            return [self._skipped(s) for s in scenarios], None
        self._audience.begins(story.name, "starting a cluster")
        seen: list[tuple[Scenario, Observed]] = []
        said: list[str] = []
        stage = Stage(story, self._folder, self._fork)
        try:
            async with stage:
                for number, scenario in enumerate(scenarios):
                    seen.append((scenario, await self._scenario(stage, scenario, number)))
                    if seen[-1][1].trouble:
                        break
                else:
                    self._audience.begins(story.name, "running to the end, for comparison")
                    said = await self._finish(stage)
        except (TimeoutError, OSError, RuntimeError) as error:
            said = [f"the cluster did not come about or to an end: {error or 'in time'}"]
        told = read_run(self._folder / "trace")
        observed = [self._with_repeats(s, told.trace) for _, s in seen]
        if not said and len(seen) == len(scenarios) and not seen[-1][1].trouble:
            golden = await self._oracle.ask(story)
            plans = [plan for s in observed for plan in s.plans]
            said = differences(told, golden, plans, observed)
        steps = len({step for _, step in told.trace.commits})
        ending = Ending(story.name, steps, tuple(said), time.monotonic() - began)
        results = []
        for (scenario, _), s in zip(seen, observed, strict=True):
            costs = () if s.trouble else costs_of(told.trace, s)
            results.append(Result(story.name, scenario, s, tuple(deviations(scenario, s)), costs))
        if not results:  # the next cluster would not come about either
            results = [
                Result(
                    story.name, s, Observed(scenario=s.name, trouble=" ".join(said)), tuple(said)
                )
                for s in scenarios
            ]
        return results, ending

    async def _scenario(self, stage: Stage, scenario: Scenario, number: int) -> Observed:
        reason = why_not(self._story, scenario)
        if reason:
            self._audience.ended(self._skipped(scenario))
            return self._skipped(scenario).seen
        self._audience.begins(self._story.name, scenario.name)
        observed = await Play(stage, scenario, f"{number}-{scenario.name}").run()
        found = tuple(deviations(scenario, observed))
        self._audience.ended(Result(self._story.name, scenario, observed, found))
        return observed

    def _skipped(self, scenario: Scenario) -> Result:
        kinds = tuple(fault.kind for fault in scenario.faults)
        reason = why_not(self._story, scenario)
        seen = Observed(scenario=scenario.name, kinds=kinds, skipped=reason)
        return Result(self._story.name, scenario, seen)

    def _with_repeats(self, seen: Observed, trace: Trace) -> Observed:
        return structs.replace(seen, repeated=repeated(trace, seen.epochs))

    async def _finish(self, stage: Stage) -> list[str]:
        """Let the job end; what was wrong with that."""
        stage.hurry()
        limit = END_S * (1 + self._story.job.steps / 1000)
        try:
            codes = await stage.cluster.finished(limit)
        except TimeoutError:
            return [f"the job did not end within {limit:g} s\n{await stage.describe()}"]
        wrong = {host: code for host, code in codes.items() if code}
        return [f"launchers ended with {wrong}"] if wrong else []


def why_not(story: Story, scenario: Scenario) -> str:
    """Why a scenario cannot be played on this machine; empty if it can."""
    kinds = [KINDS[fault.kind] for fault in scenario.faults]
    if story.cluster.network is Network.NAMESPACES:
        kinds.append(KINDS["network.cut"])
    if story.cluster.redis is Server.SENTINEL:
        kinds.append(KINDS["control.redis-failed-over"])
    if story.cluster.clocks:
        kinds.append(KINDS["host.clock-back"])
    return next((reason for kind in kinds if (reason := kind.unable())), "")


def _repeats(story: Story) -> list[Scenario]:
    return [scenario for scenario in story.scenarios for _ in range(scenario.repeat)]


def _judged(stories: Sequence[Story], results: list[Result]) -> list[Result]:
    """With what only all repeats of a scenario show, told with the last of them."""
    judged = list(results)
    for story in stories:
        for scenario in story.scenarios:
            places = [
                n
                for n, r in enumerate(judged)
                if r.story == story.name and r.scenario.name == scenario.name
            ]
            late = late_decisions(scenario, [judged[n].seen for n in places], TTL_S)
            if late:
                last = judged[places[-1]]
                both = (*last.deviations, *late)
                judged[places[-1]] = structs.replace(last, deviations=both)
    return judged
