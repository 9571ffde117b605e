"""Policies that break the contract, each in one way. They import tmd.plugin only, as it demands."""

from __future__ import annotations

from typing import Any, ClassVar

from tmd.plugin import Policy, PolicyConfig, Urgency, Verdict


class Greedy(Policy):
    name = "greedy"

    def decide(self, view: Any) -> Any:
        return [Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", "r")]


class Words(Policy):
    name = "words"

    def decide(self, view: Any) -> Any:
        return ["drain it"] if view.jobs else []


class Nothing(Policy):
    name = "nothing"

    def decide(self, view: Any) -> Any:
        return None


class Later(Policy):
    name = "later"

    async def decide(self, view: Any) -> Any:  # type: ignore[override]
        return []


class Exits(Policy):
    name = "exits"

    def decide(self, view: Any) -> Any:
        raise SystemExit(3)


class Misfit(Policy):
    name = "misfit"

    def decide(self, view: Any) -> Any:
        reason: Any = 5
        return [Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", reason)] if view.jobs else []


class Fickle(Policy):
    name = "fickle"
    asked = 0

    def decide(self, view: Any) -> Any:
        if not view.jobs:
            return []
        self.asked += 1
        return [Verdict("job", f"h{self.asked}/job/0.a", Urgency.DRAIN, "c", "r")]


class Astray(Policy):
    name = "astray"

    def decide(self, view: Any) -> Any:
        return [Verdict("job", "h3/job/0.a", Urgency.DRAIN, "c", "r")] if view.jobs else []


class LooseConfig(PolicyConfig, frozen=True, forbid_unknown_fields=False):
    limit: int = 1


class Loose(Policy):
    name = "loose"
    Config: ClassVar[type[PolicyConfig]] = LooseConfig

    def decide(self, view: Any) -> Any:
        return []
