"""The report of a campaign as one file: HTML, or Markdown with pictures inside."""

from __future__ import annotations

import html
import statistics
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tmd.campaign import picture
from tmd.campaign.campaign import CampaignOutcome, Result
from tmd.campaign.costs import Cost
from tmd.campaign.faults import KINDS
from tmd.campaign.judge import decided_s
from tmd.core.values.errors import ConfigError
from tmd.demo.cluster import LEASE_S
from tmd.demo.report import PARTS

TableRow = Sequence[str]
SUFFIXES = (".html", ".md")
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem .2rem 0;
text-align: left; border-bottom: 1px solid #ddd; vertical-align: top } .bad { color: #b00020 }
"""


def check(file: Path) -> None:
    """Check a file name before the campaign runs.

    Raises:
        ConfigError: no report can have this name.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--report {file}: the name must end with {' or '.join(SUFFIXES)}")


def write(outcome: CampaignOutcome, command: str, file: Path) -> None:
    """Write the report in the format that its suffix names."""
    text = as_html(outcome, command) if file.suffix == ".html" else as_markdown(outcome, command)
    file.write_text(text)


def as_html(outcome: CampaignOutcome, command: str) -> str:
    parts = [f"<h1>{_title(outcome)}</h1>", f"<p>{html.escape(summary(outcome))}</p>"]
    parts.append(f"<p><code>{html.escape(command)}</code></p>")
    for title, head, rows in _tables(outcome):
        parts.append(f"<h2>{title}</h2>{_html_table(head, rows)}")
    for title, svg in _pictures(outcome):
        parts.append(f"<h2>{title}</h2>{svg}")
    head = f'<meta charset="utf-8"><title>tmd campaign</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def as_markdown(outcome: CampaignOutcome, command: str) -> str:
    parts = [f"# {_title(outcome)}", summary(outcome), f"`{command}`"]
    for title, head, rows in _tables(outcome):
        parts += [f"## {title}", _markdown_table(head, rows)]
    for title, svg in _pictures(outcome):
        data = b64encode(svg.encode()).decode()
        parts += [f"## {title}", f"![{title}](data:image/svg+xml;base64,{data})"]
    return "\n\n".join(parts) + "\n"


def _title(outcome: CampaignOutcome) -> str:
    if outcome.skipped_all:
        return "Campaign: every scenario was skipped"
    return f"Campaign: {'as expected' if outcome.well else 'with deviations'}"


def summary(outcome: CampaignOutcome) -> str:
    """One sentence for people."""
    played = outcome.played
    kinds = {kind for r in played for kind in r.seen.kinds}
    steps = sum(ending.steps for ending in outcome.endings)
    same = "losses and weights identical to the undisturbed runs, bit for bit"
    proved = steps and all(e.whole and not e.deviations for e in outcome.endings)
    ended = f"; {steps} steps, {same}" if proved else ""
    if wrong := sum(bool(e.deviations) for e in outcome.endings):
        ended = f"; {_counted(wrong, 'job')} with deviations from the undisturbed run"
    return (
        f"{_counted(len(played), 'scenario')} of {_counted(len(kinds), 'kind')} of fault in "
        f"{outcome.seconds:.0f} s, "
        f"{sum(bool(r.deviations) for r in played)} with deviations, "
        f"{len(outcome.results) - len(played)} skipped{ended}."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _tables(outcome: CampaignOutcome) -> Iterable[tuple[str, TableRow, list[TableRow]]]:
    results = outcome.results
    wrong: list[TableRow] = [
        (f"{r.story}: {r.scenario.name}", d) for r in results for d in r.deviations
    ]
    wrong += [(f"{e.story}: the job", d) for e in outcome.endings for d in e.deviations]
    if wrong:
        yield "Deviations", ("scenario", "what"), wrong
    yield "Kinds by outcome", ("kind", "", "as expected", "deviating", "skipped"), _kinds(outcome)
    yield (
        "Lost time: downtime of failovers and pauses of moves, less a median step",
        COST_HEAD,
        _cost_rows(outcome),
    )
    decided = sorted(t for r in outcome.results if (t := _decision_s(r)) is not None)
    if decided:
        middle = statistics.median(decided)
        row = [
            f"{middle:.2f} s",
            f"{middle / LEASE_S:.2f}",
            f"{decided[0]:.2f}-{decided[-1]:.2f} s",
        ]
        head = (
            "from a loss without a leader to the stored plan (median)",
            "as a multiple of the lease",
            "range",
            "n",
        )
        yield "Leader failover", head, [[*row, str(len(decided))]]
    skipped: list[TableRow] = [
        [r.story, r.scenario.name, r.seen.skipped] for r in results if r.seen.skipped
    ]
    if skipped:
        yield "Not possible here", ("story", "scenario", "why"), skipped
    yield "Scenarios", ("story", "scenario", "plans", "seconds"), _scenarios(outcome)


COST_HEAD = ("kind of fault", "median", "min-max", "n", *PARTS)


def _decision_s(result: Result) -> float | None:
    return decided_s(result.seen) if result.scenario.expect.decided_within_leases else None


def _kinds(outcome: CampaignOutcome) -> list[TableRow]:
    counts: dict[str, Counter[str]] = {}
    for result in outcome.results:
        word = "skipped" if result.seen.skipped else "bad" if result.deviations else "good"
        for kind in set(result.seen.kinds):
            counts.setdefault(kind, Counter())[word] += 1
    return [
        [kind, KINDS[kind].about, *(str(counts[kind][w]) for w in ("good", "bad", "skipped"))]
        for kind in sorted(counts)
    ]


def costs_by_kind(outcome: CampaignOutcome) -> dict[str, list[Cost]]:
    """Costs by kind of fault; those of several faults in one scenario count for the last kind."""
    found: dict[str, list[Cost]] = {}
    for result in outcome.results:
        for cost in result.costs:
            found.setdefault(result.seen.kinds[-1], []).append(cost)
    return dict(sorted(found.items()))


def _cost_rows(outcome: CampaignOutcome) -> list[TableRow]:
    rows: list[TableRow] = []
    for kind, costs in costs_by_kind(outcome).items():
        lost = sorted(cost.lost_s for cost in costs)
        parts = [statistics.median(c.split[part] for c in costs) for part in PARTS]
        spread = f"{lost[0]:.3f}-{lost[-1]:.3f}"
        middle = f"{statistics.median(lost):.3f} s"
        rows.append([kind, middle, spread, str(len(lost)), *(f"{p:.3f}" for p in parts)])
    return rows


def _scenarios(outcome: CampaignOutcome) -> list[TableRow]:
    return [
        [
            r.story,
            r.scenario.name,
            ", ".join(f"{p.kind} {p.phase}" for p in r.seen.plans) or "none",
            f"{r.seen.seconds:.1f}",
        ]
        for r in outcome.results
        if not r.seen.skipped
    ]


def _pictures(outcome: CampaignOutcome) -> list[tuple[str, str]]:
    costs = costs_by_kind(outcome)
    if not costs:
        return []
    splits = {
        kind: [statistics.median(c.split[part] for c in found) for part in PARTS]
        for kind, found in costs.items()
    }
    return [
        (
            "Lost time by kind of fault",
            picture.dots({k: [c.lost_s for c in v] for k, v in costs.items()}),
        ),
        ("Where the time goes, medians", picture.bars(splits, PARTS)),
    ]


def _html_table(head: TableRow, rows: Iterable[TableRow]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _markdown_table(head: TableRow, rows: Iterable[TableRow]) -> str:
    def line(cells: TableRow) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *(line(row) for row in rows)])
