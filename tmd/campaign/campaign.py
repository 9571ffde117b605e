"""Plays stories one after the other and compares the observations with the expectations."""

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
from tmd.campaign.history import recorded, unlawful
from tmd.campaign.judge import Observed, deviations, late_decisions
from tmd.campaign.oracle import Oracle, differences, read_run, repeated
from tmd.campaign.other_release import REMEDY, OtherRelease
from tmd.campaign.play import Play, begun
from tmd.campaign.scenario import Network, Scenario, ServerKind, Story
from tmd.campaign.stage import CampaignStage
from tmd.core.values.errors import TmdError
from tmd.core.values.reasons import in_words
from tmd.demo.cluster import LEASE_S
from tmd.demo.report import DemoTrace

END_S = 120.0
"""Longest time from the last scenario to the end of the job, plus as much per 1000 steps."""


class Result(Struct, frozen=True):
    """One scenario, played once."""

    story: str
    scenario: Scenario
    seen: Observed
    deviations: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()


class Ending(Struct, frozen=True):
    """The end of one cluster's job."""

    story: str
    steps: int
    deviations: tuple[str, ...]
    seconds: float
    whole: bool = True
    """Whether the job ended as planned, so that its weights were compared, too."""


class CampaignOutcome(Struct, frozen=True):
    """Results of a whole campaign."""

    results: tuple[Result, ...]
    endings: tuple[Ending, ...]
    seconds: float

    @property
    def played(self) -> list[Result]:
        """Scenarios that were not skipped."""
        return [result for result in self.results if not result.seen.skipped]

    @property
    def skipped_all(self) -> bool:
        """Whether there were scenarios and none was played."""
        return bool(self.results) and not self.played

    @property
    def well(self) -> bool:
        """Whether all that was played, and each ending, was as expected, and not all was
        skipped."""
        if self.skipped_all:
            return False
        ends = [ending.deviations for ending in self.endings]
        return not any([*ends, *(result.deviations for result in self.results)])


class Audience(Protocol):
    """Receiver of progress reports."""

    def begins(self, story: str, what: str) -> None: ...
    def ended(self, result: Result) -> None: ...


async def run(
    stories: Sequence[Story], audience: Audience, other: OtherRelease | None = None
) -> CampaignOutcome:
    """Play all ``stories``. All processes have ended when this returns or raises.

    ``other``: for scenarios that need another release; they are skipped without one.
    """
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
                cluster = _Cluster(story, folder, fork, oracle, audience, other)
                found, ending = await cluster.play(rest)
                rest = rest[len(found) :]
                part += 1
                results += found
                endings += [ending] if ending else []
    results = _judged(stories, results)
    return CampaignOutcome(tuple(results), tuple(endings), time.monotonic() - began)


class _Cluster:
    """One cluster: plays scenarios until one breaks the cluster, or to the end of its job."""

    def __init__(
        self,
        story: Story,
        folder: Path,
        fork: Sequence[str],
        oracle: Oracle,
        audience: Audience,
        other: OtherRelease | None = None,
    ) -> None:
        self._other = other
        self._story, self._folder, self._fork = story, folder, fork
        self._oracle, self._audience = oracle, audience

    async def play(self, scenarios: Sequence[Scenario]) -> tuple[list[Result], Ending | None]:
        """Results of the played scenarios, at least one, and the end of the job."""
        story, began = self._story, time.monotonic()
        if all(self._why_not(s) for s in scenarios):
            return [self._skip(s) for s in scenarios], None
        self._audience.begins(story.name, "starting a cluster")
        seen, problems = await self._on_stage(scenarios)
        disturbed = read_run(self._folder / "trace")
        observed = [
            structs.replace(s, repeated=repeated(disturbed.trace, s.epochs, s.steps, s.plans))
            for s in seen
        ]
        history = tuple(recorded(self._folder))
        problems += unlawful(history)
        if seen and not history:
            problems.append("the daemons have recorded no history")
        whole = not problems and bool(seen) and not seen[-1].trouble
        if seen:
            plans = [plan for s in observed for plan in s.plans]
            try:
                golden = await self._oracle.ask(story)
                problems += differences(disturbed, golden, plans, observed, whole=whole)
            except RuntimeError as error:
                problems.append(in_words(error))
        steps = len({step for _, step in disturbed.trace.commits})
        ending = Ending(story.name, steps, tuple(problems), time.monotonic() - began, whole)
        if not seen:  # the next cluster would not start either
            return [
                self._skip(s) if self._why_not(s) else self._failed(s, problems) for s in scenarios
            ], ending
        return [
            self._result(disturbed.trace, *p) for p in zip(scenarios, observed, strict=False)
        ], ending

    async def _on_stage(self, scenarios: Sequence[Scenario]) -> tuple[list[Observed], list[str]]:
        """Observations of each scenario, until one breaks the cluster or the job has too few steps
        left, and the problems of the cluster or of the end of its job."""
        seen: list[Observed] = []
        try:
            async with self._stage() as stage:
                await begun(stage, next(s for s in scenarios if not self._why_not(s)))
                for number, scenario in enumerate(scenarios):
                    if number and await stage.is_near_its_last_step():
                        break
                    seen.append(await self._scenario(stage, scenario, number))
                    if seen[-1].trouble:
                        return seen, []
                self._audience.begins(self._story.name, "running to the end, for comparison")
                return seen, await self._finish(stage)
        except (TimeoutError, OSError, RuntimeError, TmdError) as error:
            where = f"after scenario '{seen[-1].scenario}'" if seen else "at its start"
            return seen, [f"the cluster failed {where}: {in_words(error)}"]

    def _stage(self) -> CampaignStage:
        return CampaignStage(self._story, self._folder, self._fork, self._other)

    def _result(self, trace: DemoTrace, scenario: Scenario, seen: Observed) -> Result:
        costs = () if seen.trouble else costs_of(trace, seen)
        found = tuple(deviations(scenario, seen))
        return Result(self._story.name, scenario, seen, found, costs)

    def _failed(self, scenario: Scenario, problems: Sequence[str]) -> Result:
        kinds = tuple(fault.kind for fault in scenario.faults)
        seen = Observed(scenario=scenario.name, kinds=kinds, trouble=" ".join(problems))
        return Result(self._story.name, scenario, seen, tuple(problems))

    async def _scenario(self, stage: CampaignStage, scenario: Scenario, number: int) -> Observed:
        if self._why_not(scenario):
            return self._skip(scenario).seen
        self._audience.begins(self._story.name, scenario.name)
        observed = await Play(stage, scenario, f"{number}-{scenario.name}").run()
        found = tuple(deviations(scenario, observed))
        self._audience.ended(Result(self._story.name, scenario, observed, found))
        return observed

    def _why_not(self, scenario: Scenario) -> str:
        return why_not(self._story, scenario, other=self._other is not None)

    def _skip(self, scenario: Scenario) -> Result:
        """The result of a scenario that this machine cannot play."""
        kinds = tuple(fault.kind for fault in scenario.faults)
        reason = self._why_not(scenario)
        seen = Observed(scenario=scenario.name, kinds=kinds, skipped=reason)
        result = Result(self._story.name, scenario, seen)
        self._audience.ended(result)
        return result

    async def _finish(self, stage: CampaignStage) -> list[str]:
        """Let the job end; returns the deviations."""
        stage.hurry()
        limit = END_S * (1 + self._story.job.steps / 1000)
        try:
            codes = await stage.cluster.finished(limit)
        except TimeoutError:
            return [f"the job did not end within {limit:g} s\n{await stage.describe()}"]
        wrong = {host: code for host, code in codes.items() if code}
        return [f"launchers ended with {wrong}"] if wrong else []


def why_not(story: Story, scenario: Scenario, *, other: bool = False) -> str:
    """Why a scenario cannot be played on this machine; empty if it can. ``other``: whether another
    release is installed."""
    kinds = [KINDS[fault.kind] for fault in scenario.faults]
    if not other and (story.cluster.needs_other or any(kind.needs_other for kind in kinds)):
        return f"needs another release of tmd: {REMEDY}"
    if story.cluster.network is Network.NAMESPACES:
        kinds.append(KINDS["network.cut"])
    if story.cluster.redis is ServerKind.SENTINEL:
        kinds.append(KINDS["control.redis-failed-over"])
    if story.cluster.clocks:
        kinds.append(KINDS["host.clock-back"])
    return next((reason for kind in kinds if (reason := kind.unable())), "")


def _repeats(story: Story) -> list[Scenario]:
    return [scenario for scenario in story.scenarios for _ in range(scenario.repeat)]


def _judged(stories: Sequence[Story], results: list[Result]) -> list[Result]:
    """Add deviations that only all repeats of a scenario together show, to the last result."""
    judged = list(results)
    for story in stories:
        for scenario in story.scenarios:
            places = [
                n
                for n, r in enumerate(judged)
                if r.story == story.name and r.scenario.name == scenario.name
            ]
            late = late_decisions(scenario, [judged[n].seen for n in places], LEASE_S)
            if late:
                last = judged[places[-1]]
                both = (*last.deviations, *late)
                judged[places[-1]] = structs.replace(last, deviations=both)
    return judged
