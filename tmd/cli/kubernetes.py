"""The verb kubernetes: an operator that keeps nodes of Kubernetes and hosts of tmd in agreement."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from tmd.cli.common import ConfigOption, with_store
from tmd.cli.scheduling import look_once
from tmd.cli.shipped import documentation_at
from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words
from tmd.extras import need

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.daemon.store import RedisStore

RUNBOOK = "docs/operate/runbook.md"
"""Where to read on if nobody has said where the documentation is served: in the source tree."""
LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
"""Names and values of labels, as the API server accepts them. The limits on length are not
checked."""

kubernetes = typer.Typer(help="Work together with Kubernetes.", no_args_is_help=True)


EveryOption = Annotated[
    float, typer.Option(min=1.0, help="Longest time in seconds between two looks.")
]
LeaveOption = Annotated[
    bool, typer.Option("--leave", help="Workers of a drained host exit once it holds no rank.")
]
SelectorOption = Annotated[
    str, typer.Option(help="Labels of the nodes to look after: 'name=value,name'.")
]
HealthyOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Minutes without a finding, in one run of the daemon, after which its node is "
        "healthy again. 'tmd set-healthy' makes it so at once.",
    ),
]
DocsOption = Annotated[
    str, typer.Option(help="Address of tmd's documentation, for links to the runbook.")
]


@kubernetes.command("run")
def run(
    config: ConfigOption = None,
    every: EveryOption = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    leave: LeaveOption = False,
    namespace: Annotated[
        str,
        typer.Option(help="Namespace of the DrainRequests of NVSentinel; empty: look at none."),
    ] = "nvsentinel",
    selector: SelectorOption = "",
    healthy_after: HealthyOption = 10.0,
    docs: DocsOption = "",
    liveness: Annotated[str, typer.Option(help="host:port that answers GET /healthz.")] = "",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Look once; print the changes and make none."),
    ] = False,
) -> None:
    """Turn cordoned nodes and DrainRequests of NVSentinel into drains of tmd, and findings of tmd
    into conditions of nodes and Events.

    It takes back only what it has set, cordons no node and evicts no pod."""
    need("kubernetes", "the operator")
    from tmd.core.planning.kubernetes import KubernetesRules

    labels, alive = labels_of(selector), liveness_at(liveness)
    runbook = f"{documentation_at(docs)}/operate/runbook.html" if docs else RUNBOOK

    async def work(store: RedisStore, settings: Settings) -> None:
        from tmd.kubernetes import operator
        from tmd.kubernetes.api import Kubernetes

        rules = KubernetesRules(
            runbook,
            healthy_after_s=60 * healthy_after,
            hosts_share=settings.breaker.hosts_percent / 100,
            leave=leave,
        )
        async with Kubernetes(namespace, labels) as cluster:
            look = operator.KubernetesSynchronizer(store, cluster, rules).look
            if once or dry_run:
                await look_once(partial(look, dry_run=dry_run))
            else:
                await operator.run(look, every_s=every, namespace=namespace, liveness=alive)

    with_store(config, work)


def labels_of(selector: str) -> dict[str, str | None]:
    """The labels of ``--selector``; ``None`` for any value.

    Raises:
        ConfigError: a part is no label that a node can have.
    """
    found: dict[str, str | None] = {}
    for part in filter(None, selector.split(",")):
        name, has_value, value = part.strip().partition("=")
        if not (LABEL.fullmatch(name) and VALUE.fullmatch(value)):
            raise ConfigError(f"--selector: write name=value or name instead of '{part}'")
        found[name] = value if has_value else None
    return found


def liveness_at(listen: str) -> str:
    """The address in ``--liveness``; empty if none was given.

    Raises:
        ConfigError: it is not host:port.
    """
    from tmd.sections import place

    try:
        address = place(listen)
    except ValueError as error:
        raise ConfigError(f"--liveness '{listen}': {in_words(error)}") from None
    if address is None:
        return ""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
