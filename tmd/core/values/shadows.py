"""A worker's report on the rank that it shadows and on its rehearsals."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from tmd.core.values.membership import Member

LINK_SHARE = 0.5
"""Part of a link's rate that the outputs of a rank may take; a state and votes go over it, too."""
GRADIENT_SHARE = 0.5
"""Gradients are sent instead of outputs if they are at most this part of them."""


def excess(outputs: float, gradients: float, step_s: float, rate: float) -> str:
    """Why a rank should send its gradients instead of its outputs; empty if it should not.

    Args:
        outputs: bytes of a step's collective outputs.
        gradients: bytes of its final gradients.
        step_s: duration of the step.
        rate: bytes per second that the link to the joiner has carried; 0 if not measured.
    """
    carried = LINK_SHARE * rate * step_s
    if not carried or outputs <= carried or not spares(outputs, gradients):
        return ""
    return (
        f"the {outputs / 1e6:.0f} MB of outputs in a step of {step_s:.2g} s exceed half of the "
        f"{rate / 1e6:.0f} MB/s of the link"
    )


def spares(outputs: float, gradients: float) -> bool:
    """Whether a link has much less to carry if it gets gradients instead of outputs."""
    return gradients <= GRADIENT_SHARE * outputs


class ShadowStatus(Struct, frozen=True, gc=False):
    """Progress of a shadow."""

    rank: int
    copied: float = 0.0
    """Fraction of the state that has arrived, 0 to 1."""
    lag_s: float = 0.0
    """Time from the rank's start of the latest step to the shadow's."""
    verified: int | None = None
    """Newest step at whose start both digests were equal."""
    note: str = ""
    """Unusual events."""


class ShadowAssignment(Struct, frozen=True):
    """A standby that shadows a rank without a planned move."""

    member: Member
    rank: int
    stay: bool
    """Hot: it stays. Otherwise it leaves once it has computed the same bits."""
    request: str = ""
    """Id of the rehearsal request that it serves."""


class Rehearsal(Struct, frozen=True, gc=False):
    """The verdict of one rehearsal; it holds for all ranks that are built alike."""

    step: int
    """The step at whose start its digest equalled the rank's, or at which it gave up."""
    seconds: float
    refusal: str = ""
    """Why it must not get such a rank; empty if it may."""
    note: str = ""
    """Why there is no result; it may get a rank."""
    request: str = ""
    """Id of the request that it answers."""
    role: str = ""
    """Role of such ranks: see ``WorkerStatus.role``."""
    ranks: tuple[int, ...] = ()
    """Ranks with this role; empty if unknown."""
    suspect: bool = False
    """It computed other bits: its machine must get no rank at all."""
    refused_rank: int | None = None
    """The rank whose planned move the worker refused, instead of failing a rehearsal. The source of
    the move may be wrong: a rehearsal, if possible of another rank, decides."""

    @property
    def has_shown(self) -> bool:
        """Whether it computed the same bits."""
        return not self.refusal and not self.note

    def is_about(self, rank: int, role: str) -> bool:
        """Whether it concerns ``rank`` of ``role``; without a known role it depends on the ranks'
        roles at the time of the rehearsal."""
        if role and self.role:
            return self.role == role
        return not self.ranks or rank in self.ranks


Verdicts = tuple[Rehearsal, ...]
"""The latest verdict for each role, newest last."""


def noted(before: Verdicts, verdict: Rehearsal, rank: int, roles: Sequence[str]) -> Verdicts:
    """``verdict`` on ``rank``, and those ``before`` on other roles that still exist.

    ``roles``: of all ranks of the job, by rank; empty if unknown.
    """
    role = roles[rank] if rank < len(roles) else ""
    ranks = tuple(r for r, each in enumerate(roles) if each == role)
    others = tuple(v for v in before if v.role != role and (not roles or v.role in roles))
    last = next((v for v in before if v.role == role), None)
    if verdict.note and last is not None and last.refusal:
        # Without a result the previous verdict still holds.
        verdict = structs.replace(last, request=verdict.request, refused_rank=None)
    return (*others, structs.replace(verdict, role=role, ranks=ranks))


def verdict_on(verdicts: Verdicts, rank: int, role: str) -> Rehearsal | None:
    """The latest verdict on ``rank`` of ``role`` (empty if unknown)."""
    return next((v for v in reversed(verdicts) if v.is_about(rank, role)), None)


def why_unfit(verdicts: Verdicts, rank: int, role: str) -> str:
    """Why ``rank`` of ``role`` must not go to a worker; empty if it may."""
    last = verdict_on(verdicts, rank, role)
    found = [v for v in verdicts if v.refusal and (v.suspect or v is last)]
    return found[-1].refusal if found else ""


def unfitness(verdicts: Verdicts) -> str:
    """Ranks that the worker must not get, with the reason, in a sentence; empty if none."""
    suspect = [v.refusal for v in verdicts if v.refusal and v.suspect]
    if suspect:
        return f"it gets no rank: {suspect[-1]}"
    refused = [(v.ranks, v.refusal) for v in verdicts if v.refusal]
    return "; ".join(
        f"it gets none of ranks {ranges(ranks)}: {why}" if ranks else f"it gets no rank: {why}"
        for ranks, why in refused
    )


def ranges(ranks: Sequence[int]) -> str:
    """``ranks`` as ``0-2, 5``; fast for any number of ranks."""
    known = set(ranks)
    ends = [r for r in ranks if r + 1 not in known]
    begins = [r for r in ranks if r - 1 not in known]
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(begins, ends, strict=True))
