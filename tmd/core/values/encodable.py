"""Reports of workers as JSON can hold them.

JSON has no NaN and no infinity. One of them, or a text without end, would make the status of a
whole host unreadable, and with it all of its workers. A worker is not refused for it: these numbers
and texts are measurements and explanations, and training goes on without them.
"""

from __future__ import annotations

from math import isfinite

from msgspec import structs

from tmd.core.values.model import Exit, WorkerStatus
from tmd.core.values.pace import Pace
from tmd.core.values.shadows import Rehearsal, ShadowStatus

LONGEST = 1000
"""Maximum length of an explanation."""


def encodable(status: WorkerStatus) -> WorkerStatus:
    """``status`` without what is no number: a time becomes 0, a pace unknown, a timing is left out.
    Long explanations are cut. The loss stays as it is, for the detectors of the host, until
    :func:`with_encodable_loss`."""
    return structs.replace(
        status,
        step_seconds=_number(status.step_seconds),
        stands_s=_number(status.stands_s),
        pace=status.pace if status.pace is None or _is_known(status.pace) else None,
        detail=_short(status.detail),
        shadow=None if status.shadow is None else _shadow(status.shadow),
        rehearsed=tuple(map(_rehearsal, status.rehearsed)),
        timings={name: each for name, each in status.timings.items() if isfinite(each)},
    )


def with_encodable_loss(status: WorkerStatus) -> WorkerStatus:
    """``status`` with an unknown loss in place of one that is no number."""
    if status.loss is None or isfinite(status.loss):
        return status
    return structs.replace(status, loss=None)


def encodable_exit(ended: Exit, now: float) -> Exit:
    """``ended``, at ``now`` if its time is no number; wall-clock seconds."""
    return ended if isfinite(ended.at) else structs.replace(ended, at=now)


def _is_known(pace: Pace) -> bool:
    return all(map(isfinite, (pace.busy_s, pace.ratio, pace.lost_s)))


def _shadow(shadow: ShadowStatus) -> ShadowStatus:
    copied, lag_s = _number(shadow.copied), _number(shadow.lag_s)
    return structs.replace(shadow, copied=copied, lag_s=lag_s, note=_short(shadow.note))


def _rehearsal(verdict: Rehearsal) -> Rehearsal:
    return structs.replace(
        verdict,
        seconds=_number(verdict.seconds),
        refusal=_short(verdict.refusal),
        note=_short(verdict.note),
    )


def _number(given: float) -> float:
    return given if isfinite(given) else 0.0


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
