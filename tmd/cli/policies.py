"""The verb policy explain, and the output of dry runs: what would be decided, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption, with_store
from tmd.cli.output import print_json, say
from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.errors import TmdError
from tmd.core.values.reasons import in_words, os_reason

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import ClusterView, MigrationPlan
    from tmd.daemon.store import RedisStore

policy = typer.Typer(help="Explain what the policies request, and why.", no_args_is_help=True)


@policy.command("explain")
def explain(
    config: ConfigOption = None,
    view: Annotated[
        Path | None,
        typer.Option("--view", help="A recorded view, as 'tmd status --json' prints it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print every verdict on the current or a recorded view, and what would be done.

    Nothing is written. Exit status 1 if a policy fails.
    """
    from tmd.config import load

    if view is not None:
        _print(_read(view), load(config), as_json)
        return

    async def look(store: RedisStore, settings: Settings) -> None:
        _print(await store.snapshot(), settings, as_json)

    with_store(config, look)


def _read(file: Path) -> ClusterView:
    import msgspec

    from tmd.core.values.model import ClusterView

    try:
        values = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        if "hosts" not in values:  # any other object would pass: all fields have defaults
            raise msgspec.ValidationError("there are no 'hosts'")
        return msgspec.convert(values, ClusterView)
    except OSError as error:
        raise TmdError(f"cannot read {file}: {os_reason(error)}") from None
    except UNREADABLE as error:
        raise TmdError(
            f"{file} is not a view in the format of 'tmd status --json': {in_words(error)}"
        ) from None


def _print(view: ClusterView, settings: Settings, as_json: bool) -> None:
    found = outlook(view, settings)
    if as_json:
        print_json(found)
    else:
        for line in lines(found):
            say(line)
    if found["failed"]:
        raise typer.Exit(1)


def outlook(view: ClusterView, settings: Settings) -> dict[str, Any]:
    """All decisions about ``view``: rulings, findings that may not act, resulting plans."""
    from tmd.core.alerts.breaker import tripped
    from tmd.daemon.plugins import load_policies
    from tmd.daemon.policy_runner import foreseen, rulings, withheld

    rules = settings.breaker.rules()
    failed: dict[str, str] = {}
    found = rulings(
        load_policies(settings),
        view,
        rules,
        lambda policy, error: failed.update({policy.name: in_words(error)}),
    )
    jobs = foreseen(found, view, settings.limits.limits(), now=time.time())
    return {
        "breaker": view.breaker.reason if view.breaker.open else "",
        "would_open": tripped(view, rules) or "",
        "failed": failed,
        "rulings": found,
        "withheld": [{"alert": alert, "why": why} for alert, why in withheld(view, rules)],
        "jobs": jobs,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The outlook as text."""
    if found["breaker"]:
        yield f"the circuit breaker is open: {found['breaker']}"
    if found["would_open"]:
        yield f"the circuit breaker would be opened: {found['would_open']}"
    for name, why in found["failed"].items():
        yield f"policy {name} failed, its verdicts are ignored: {why}"
    if not found["rulings"]:
        yield "no policy requests anything"
    for ruling in found["rulings"]:
        verdict = ruling.verdict
        yield f"{verdict.policy}: {verdict.urgency} {verdict.worker}: {verdict.reason}"
        if ruling.held_back:
            yield f"  held back: {ruling.held_back}"
    for each in found["withheld"]:
        alert = each["alert"]
        yield f"{alert.host}: {alert.code} of {alert.entity} moves no rank: {each['why']}"
    for job in found["jobs"]:
        yield from plan_lines(job.job, job.plan, job.waits)


def plan_lines(job: str, plan: MigrationPlan | None, waits: str) -> Iterator[str]:
    """What would be done about one job."""
    if plan is not None:
        yield f"{job}: {plan.kind} {plan.id} because of {plan.cause}"
        for move in plan.moves:
            joiner = move.joiner.worker if move.joiner else "a standby, once all have halted"
            yield f"  rank {move.rank}: {move.leaver.worker} -> {joiner}"
        for reason in plan.choice:
            yield f"  {reason}"
    elif waits:
        yield f"{job}: {waits}"
    else:
        yield f"{job}: nothing would be done"
