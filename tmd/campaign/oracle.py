"""The undisturbed run of a story's job, and the comparison with it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from tmd.campaign.judge import Observed
from tmd.campaign.scenario import Story
from tmd.campaign.stage import script
from tmd.core.values.model import MigrationPlan
from tmd.core.values.reasons import in_words
from tmd.demo.report import DemoTrace, committed_twice, compare, read_trace
from tmd.demo.story import run_golden


class JobRun(Struct, frozen=True):
    """Trace and weights of a job."""

    trace: DemoTrace
    weights: dict[str, str]
    """Digest of the final weights by rank."""
    shadows: dict[str, str] = {}
    """Digests of standbys that shadowed a rank to the end."""


class Oracle:
    """Runs each job undisturbed once."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        self._folder = folder
        self._prefix = tuple(prefix)
        self._known: dict[tuple[str, ...], JobRun | str] = {}
        """The run of each job, or why it failed."""

    async def ask(self, story: Story) -> JobRun:
        """Run the job of ``story`` undisturbed; returns its results.

        Raises:
            RuntimeError: the run failed, now or before.
        """
        command, ranks = script(story), story.cluster.ranks
        key = (str(ranks), *command)
        if key not in self._known:
            folder = self._folder / f"golden-{len(self._known)}"
            try:
                await run_golden(command, ranks, folder, folder.with_suffix(".log"), self._prefix)
                self._known[key] = read_run(folder)
            except (RuntimeError, OSError) as error:
                self._known[key] = in_words(error)
        found = self._known[key]
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def read_run(folder: Path) -> JobRun:
    """The files that the workers have written to ``folder``."""
    weights, shadows = (_digests(folder, kind) for kind in ("weights", "shadow"))
    return JobRun(read_trace(folder), weights, shadows)


def _digests(folder: Path, kind: str) -> dict[str, str]:
    return {f.name.rpartition("-")[2]: f.read_text() for f in sorted(folder.glob(f"{kind}-*"))}


def differences(
    run: JobRun,
    golden: JobRun,
    plans: Iterable[MigrationPlan],
    seen: Sequence[Observed],
    *,
    whole: bool,
) -> list[str]:
    """All differences, in sentences; the first one names the previous scenario. Of a run that is
    not ``whole``, since it ended early, only committed steps are compared."""
    known = list(plans)
    wrong = [step for step, _ in run.trace.differing(golden.trace)]
    twice = committed_twice(run.trace, known)
    after = _after(wrong or [each.step for each in twice], seen)
    if not whole:
        first = [f"{len(wrong)} losses differ"] if wrong else [str(each) for each in twice[:1]]
        return [f"{each}{after}" for each in first]
    found = compare(run.trace, golden.trace, known)
    sentences = []
    if found.difference:
        sentences.append(f"{found.difference}{after}")
    if run.weights != golden.weights:
        ranks = [r for r in golden.weights if run.weights.get(r) != golden.weights[r]]
        sentences.append(f"the final weights of ranks {', '.join(ranks)} differ")
    strange = [r for r, digest in run.shadows.items() if digest != golden.weights[r]]
    if strange:
        sentences.append(f"a standby ended with other weights than rank {', '.join(strange)}")
    return sentences


def _after(steps: Sequence[int], seen: Sequence[Observed]) -> str:
    """The scenario before the first of ``steps``, of those that were played."""
    played = [s for s in seen if any(s.steps)]
    before = [s.scenario for s in played if steps and s.steps[0] <= steps[0]]
    return f", after scenario '{before[-1]}'" if before else ""


def repeated(
    trace: DemoTrace,
    epochs: tuple[int, int],
    steps: tuple[int, int],
    plans: Iterable[MigrationPlan] = (),
) -> int:
    """Highest number of steps that a rank repeated between two moments, each an epoch and the
    foremost rank's step. A rank may still be in the step before.

    ``plans``: those of that time. Their rollbacks repeat steps that were committed.
    """
    first, last = (epochs[0], steps[0] - 1), (epochs[1], steps[1])
    counts: dict[int, set[int]] = {}
    for line in trace.undone:
        if first <= (line["epoch"], line["undone"]) < last:
            counts.setdefault(line["rank"], set()).add(line["undone"])
    back = sum(plan.rollback.repeats for plan in plans if plan.rollback is not None)
    return back + max((len(steps) for steps in counts.values()), default=0)
