"""Checkpoints in a folder that all ranks share: schedule, names, and outdated folders.

A *checkpoint* of step s is the state of every rank at the start of s. It is complete once its
folder has its final name; until then the ranks write their parts into a folder of another name.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from tmd.core.values.decode_errors import brief

PREFIX, PARTIAL, REFUSED, GONE = "step-", ".partial", ".refused", ".gone"


class SavedCheckpoint(Struct, frozen=True, order=True, gc=False):
    """A complete checkpoint."""

    step: int
    at: float
    """Time of completion (wall clock, for people)."""
    path: str


class MissedCheckpoint(Struct, frozen=True):
    """A checkpoint that was due and failed, as far as this rank caused or knows it."""

    step: int
    reason: str
    count: int
    """Number of misses since the last complete one, including this."""


def missed_too(before: MissedCheckpoint | None, step: int, reason: str) -> MissedCheckpoint:
    """The checkpoint of ``step`` failed; ``before``: the previous miss, if any."""
    return MissedCheckpoint(step, brief(reason), 1 if before is None else before.count + 1)


def still_missed(
    missed: MissedCheckpoint | None, saved: SavedCheckpoint
) -> MissedCheckpoint | None:
    """The miss that remains after ``saved``: none if ``saved`` is later."""
    return None if missed is not None and missed.step <= saved.step else missed


def is_due(step: int, every: int, *, first: bool) -> bool:
    """Whether a checkpoint of ``step`` is due: the same answer on every rank.

    ``first``: the step is the first one of a ``batches()`` call. The end of the previous call
    counts as a step but cannot be resumed from.
    """
    return step % every == 0 or (first and (step - 1) % every == 0 and step > 1)


def name_of(step: int) -> str:
    """Name of the folder of a complete checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(name: str, ending: str = "") -> int | None:
    """The inverse of :func:`name_of`, of a name with ``ending``; ``None`` for all other names."""
    if not name.endswith(ending):
        return None
    name = name.removesuffix(ending)
    digits = name.removeprefix(PREFIX)
    if not digits.isdecimal() or name_of(int(digits)) != name:
        return None
    return int(digits)


def complete(names: Iterable[str]) -> list[int]:
    """Steps with a complete checkpoint, newest first."""
    return sorted((s for n in names if (s := step_of(n)) is not None), reverse=True)


def unneeded(names: Iterable[str], keep: int, *, partial_before: int) -> list[str]:
    """Folders to remove: complete ones except the newest ``keep``, refused ones older than all
    that stay, and incomplete ones from before step ``partial_before``."""
    names = list(names)
    steps = complete(names)
    stay = set(steps[:keep])
    oldest = min(stay, default=0)
    gone = [name_of(step) for step in steps if step not in stay]
    # Its removal was interrupted.
    gone += [name for name in names if name.startswith(PREFIX) and name.endswith(GONE)]
    for name in names:
        for ending, before in ((PARTIAL, partial_before), (REFUSED, oldest)):
            step = step_of(name, ending)
            if step is not None and step < before:
                gone.append(name)
    return gone


def newest(known: Iterable[SavedCheckpoint | None]) -> SavedCheckpoint | None:
    """The newest checkpoint that workers report."""
    return max((saved for saved in known if saved is not None), default=None)


def advice(known: Iterable[SavedCheckpoint | None]) -> str:
    """The user's options if no worker has the state; ``known``: reported checkpoints."""
    last = newest(known)
    if last is None:
        return "start the job again from its newest checkpoint"
    return (
        f"start it again with the same 'tmd launch' on all hosts: it resumes from step "
        f"{last.step} ({last.path})"
    )
