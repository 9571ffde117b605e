"""The operator: reconciles Kubernetes nodes with tmd hosts, whenever kopf reports a change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import kopf

from tmd.cli.scheduling import (
    DoneAndFailed,
    Drains,
    HostHistory,
    NamedChange,
    carry_out,
    look_always,
)
from tmd.core.planning.kubernetes import KubernetesChanges, KubernetesRules, changes
from tmd.core.values.model import ClusterView
from tmd.core.values.reasons import in_words
from tmd.daemon.bus import Store, WakeEvent
from tmd.kubernetes import objects
from tmd.kubernetes.api import Kubernetes, KubernetesError

SETTLE_S = 0.1
"""Pause after an event: the list at the start, or the cordon of a rack, sends many."""


class KubernetesSynchronizer:
    """Reconciles both sides."""

    def __init__(self, store: Store, kubernetes: Kubernetes, rules: KubernetesRules) -> None:
        self._history = HostHistory(store)
        self._drains = Drains(store, leave=rules.leave)
        self._kubernetes = kubernetes
        self._rules = rules

    async def look(self, *, dry_run: bool = False) -> DoneAndFailed:
        """Look once and change what differs.

        Raises:
            StoreUnavailable: Redis does not answer.
            KubernetesError: the API server gives no list.
        """
        nodes, asked = await self._kubernetes.nodes(), await self._kubernetes.drains()
        view, records, now = await self._history.look()
        found = changes(view, nodes, asked, records=records, now=now, rules=self._rules)
        return found.problems, await carry_out(self._steps(found, view), dry_run=dry_run)

    def _steps(self, found: KubernetesChanges, view: ClusterView) -> Iterator[NamedChange]:
        yield from self._drains.steps(view, found.drain, found.undrain, found.barred)
        for change in found.mark:
            new = change.condition
            line = f"mark node {change.node.name} {new.status}: {new.reason}: {new.message}"
            yield line, partial(self._kubernetes.mark, change)
        for drain, why in found.complete:
            line = f"complete DrainRequest {drain.namespace}/{drain.name}: {why}"
            yield line, partial(self._kubernetes.complete, drain, why)


class Watch:
    """Rings at each event of a DrainRequest, and when the cordon or the host of a node changes."""

    def __init__(self) -> None:
        self.event = WakeEvent()
        self._seen: dict[str, tuple[bool, str]] = {}

    def registry(self, *, with_drains: bool) -> kopf.OperatorRegistry:
        """The handlers. None of them changes an object."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        kopf.on.event("v1", "nodes", registry=registry)(self._node)
        if not with_drains:
            return registry
        kopf.on.event(objects.GROUP, objects.VERSION, objects.PLURAL, registry=registry)(
            self._drain
        )
        return registry

    async def _node(self, body: Any, **_: Any) -> None:
        # Kubelets update every node every few minutes; most updates change neither.
        node = objects.node_of(body)
        mark = (node.cordoned, node.host)
        if self._seen.get(node.name) != mark:
            self._seen[node.name] = mark
            self.event.ring()

    async def _drain(self, **_: Any) -> None:
        self.event.ring()


async def run(
    look: Callable[[], Awaitable[DoneAndFailed]],
    *,
    every_s: float,
    namespace: str,
    liveness: str = "",
    stop: asyncio.Event | None = None,
) -> None:
    """Look at every change and every ``every_s``, until SIGTERM, SIGINT or ``stop``.

    ``namespace``: of the DrainRequests, empty for none.

    Raises:
        KubernetesError: the API server cannot be watched any longer, or the liveness endpoint
            cannot be opened.
    """
    watch = Watch()

    async def rest() -> None:
        await watch.event.wait(every_s)
        await asyncio.sleep(SETTLE_S)

    # Create this task before kopf starts: kopf cancels all that are created later when it ends.
    looking = asyncio.create_task(look_always(look, rest))
    watching = asyncio.create_task(_watched(watch, namespace, liveness, stop))
    try:
        done, _ = await asyncio.wait((looking, watching), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (looking, watching):
            task.cancel()
        await asyncio.gather(looking, watching, return_exceptions=True)


async def _watched(watch: Watch, namespace: str, liveness: str, stop: asyncio.Event | None) -> None:
    # kopf logs the errors of its tasks but does not await all of them: asyncio would log them too.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # No right to list CRDs and namespaces is needed then.
    settings.scanning.disabled = True
    try:
        await kopf.operator(
            registry=watch.registry(with_drains=bool(namespace)),
            settings=settings,
            clusterwide=not namespace,
            namespaces=[namespace] if namespace else (),
            standalone=True,
            liveness_endpoint=f"http://{liveness}/healthz" if liveness else None,
            stop_flag=stop,
        )
    except kopf.LoginError:
        raise KubernetesError("the API server accepts no credentials of this operator") from None
    except Exception as error:
        raise KubernetesError(f"cannot watch any longer: {in_words(error)}") from error


def _login(**known: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)
