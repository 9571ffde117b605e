"""Does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tmd.plugin import ClusterView, Policy, Verdict


class ObserveOnly(Policy):
    """For the first weeks in a new cluster: enable it alone."""

    name: ClassVar[str] = "observe_only"

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        return ()
