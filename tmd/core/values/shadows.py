"""What a worker reports of the rank that it shadows and of its rehearsals."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from tmd.core.values.membership import Member


class ShadowStatus(Struct, frozen=True):
    """How far a shadow is behind its rank."""

    rank: int
    copied: float = 0.0
    """Part of the state that has arrived, 0 to 1."""
    lag_s: float = 0.0
    """How long after the rank it began its latest step."""
    verified: int | None = None
    """Newest step at whose start both had the same digest."""
    note: str = ""
    """What was out of the ordinary."""


class Understudy(Struct, frozen=True):
    """A standby that follows a rank though no move is planned."""

    member: Member
    rank: int
    stay: bool
    """Hot: it stays. Else it leaves once it has computed the same bits."""
    request: str = ""
    """Id of the request for a rehearsal that it serves."""


class Rehearsal(Struct, frozen=True):
    """The verdict of one rehearsal; it holds for all ranks that are built alike."""

    step: int
    """At whose start it had the rank's digest after a step of its own; else where it gave up."""
    seconds: float
    refusal: str = ""
    """Why it must not have such a rank; empty if it may."""
    note: str = ""
    """Why nothing was found out; it may have a rank."""
    request: str = ""
    """Id of the request that it answers."""
    role: str = ""
    """What such ranks are built as: see ``WorkerStatus.role``."""
    ranks: tuple[int, ...] = ()
    """Those that were built so; empty if that is not known."""
    suspect: bool = False
    """It computed other bits: its machine must have no rank at all."""
    refused_rank: int | None = None
    """Set if the worker refused a planned move of this rank instead of failing a rehearsal. The
    source of the move may be wrong: a rehearsal, of another rank if there is one, settles that."""

    @property
    def has_shown(self) -> bool:
        """Whether it has computed the same bits."""
        return not self.refusal and not self.note

    def is_about(self, rank: int, role: str) -> bool:
        """Whether it tells of ``rank``, which is built as ``role``; empty if nobody says as what:
        then it goes by how the ranks were built when it rehearsed."""
        if role and self.role:
            return self.role == role
        return not self.ranks or rank in self.ranks


Verdicts = tuple[Rehearsal, ...]
"""The latest of each role, newest last."""


def noted(before: Verdicts, verdict: Rehearsal, rank: int, roles: Sequence[str]) -> Verdicts:
    """``verdict`` on ``rank``, and what was found ``before`` of other roles that are still there.

    ``roles``: of all ranks of the job, by rank; empty if they were not heard.
    """
    role = roles[rank] if rank < len(roles) else ""
    ranks = tuple(r for r, each in enumerate(roles) if each == role)
    others = tuple(v for v in before if v.role != role and (not roles or v.role in roles))
    last = next((v for v in before if v.role == role), None)
    if verdict.note and last is not None and last.refusal:
        # Nothing was found out, so what was found before still holds.
        verdict = structs.replace(last, request=verdict.request, refused_rank=None)
    return (*others, structs.replace(verdict, role=role, ranks=ranks))


def verdict_on(verdicts: Verdicts, rank: int, role: str) -> Rehearsal | None:
    """The latest that tells of ``rank``, which is built as ``role`` (empty if that is unknown)."""
    return next((v for v in reversed(verdicts) if v.is_about(rank, role)), None)


def why_unfit(verdicts: Verdicts, rank: int, role: str) -> str:
    """Why ``rank``, which is built as ``role``, must not go to a worker; empty if it may."""
    last = verdict_on(verdicts, rank, role)
    found = [v for v in verdicts if v.refusal and (v.suspect or v is last)]
    return found[-1].refusal if found else ""


def unfitness(verdicts: Verdicts) -> str:
    """Which ranks the worker gets none of, and why, in a sentence; empty if it may have any."""
    suspect = [v.refusal for v in verdicts if v.refusal and v.suspect]
    if suspect:
        return f"it gets no rank: {suspect[-1]}"
    refused = [(v.ranks, v.refusal) for v in verdicts if v.refusal]
    return "; ".join(
        f"it gets none of ranks {ranges(ranks)}: {why}" if ranks else f"it gets no rank: {why}"
        for ranks, why in refused
    )


def ranges(ranks: Sequence[int]) -> str:
    """``ranks`` as ``0-2, 5``. Of any number of ranks: it is asked for many at each look."""
    known = set(ranks)
    ends = [r for r in ranks if r + 1 not in known]
    begins = [r for r in ranks if r - 1 not in known]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(begins, ends, strict=True))
