"""Moves ranks off a host that an operator drains, while training continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tmd.plugin import ClusterView, DrainRequest, JobState, Policy, Urgency, Verdict


class DrainRequested(Policy):
    name: ClassVar[str] = "drain_requested"

    def decide(self, view: ClusterView) -> Sequence[Verdict]:
        requests = {request.host: request for request in view.drains}
        return [
            self._verdict(record.job, member.worker, requests[member.host])
            for record in view.jobs
            if record.state is JobState.RUNNING
            for member in record.membership.members
            if member.host in requests and not record.served(requests[member.host])
        ]

    def _verdict(self, job: str, worker: str, request: DrainRequest) -> Verdict:
        by = f" by {request.by}" if request.by else ""
        return Verdict(
            job=job,
            worker=worker,
            urgency=Urgency.DRAIN,
            cause="drain",
            reason=f"drain of {request.host} requested{by}",
            policy=self.name,
            leave=request.leave,
            request=request.id,
        )
