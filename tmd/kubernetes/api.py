"""What the operator asks of the API server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import httpx2
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError as WrongConfig
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import PatchType
from yaml import YAMLError

from tmd.cli.scheduling import SchedulerError
from tmd.core.planning.kubernetes import KubernetesNode, NodeChange, NodeDrain, NodeEvent
from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words
from tmd.kubernetes import objects

PAGE = 500
NOT_FOUND, CONFLICT = 404, 409

_NODE = create_global_resource("", "v1", "Node", "nodes")
_EVENT = create_namespaced_resource("", "v1", "Event", "events")
_DRAIN = create_namespaced_resource(objects.GROUP, objects.VERSION, objects.KIND, objects.PLURAL)


UNUSABLE = (WrongConfig, YAMLError, LookupError, ValueError, TypeError, AttributeError, OSError)
"""What lightkube raises for a kubeconfig that is missing or damaged."""
REFUSED = frozenset({401, 403})
"""Status codes that mean a missing right."""
PASSING = frozenset({408, 409, 429})
"""Client errors after which the same request may succeed. Admission policies answer others."""


class KubernetesError(SchedulerError):
    """The API server does not answer, refuses, or answers something unexpected."""


class RefusedError(KubernetesError):
    """The API server refuses a request, for lack of a right or by a policy."""


class Kubernetes:
    """The nodes and DrainRequests of a cluster. Use it as a context."""

    def __init__(self, namespace: str, labels: Mapping[str, str | None]) -> None:
        """``namespace``: of the DrainRequests, empty for none; ``labels``: of the nodes to
        look after (``None``: with any value).

        Raises:
            ConfigError: nothing says where the API server is.
        """
        self._namespace = namespace
        self._labels = dict(labels)
        self._client = _client()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def nodes(self) -> list[KubernetesNode]:
        """All of them; those without the labels are not selected.

        Raises:
            KubernetesError: the API server gives no list.
        """
        with _explained_as("list nodes"):
            found = self._client.list(_NODE, chunk_size=PAGE)
            return [objects.node_of(body, self._labels) async for body in found]

    async def drains(self) -> list[NodeDrain]:
        """The DrainRequests; none if there is no such resource.

        Raises:
            KubernetesError: the API server gives no list.
        """
        if not self._namespace:
            return []
        with _explained_as("list DrainRequests"):
            drains = []
            with _tolerate(NOT_FOUND):
                found = self._client.list(_DRAIN, namespace=self._namespace, chunk_size=PAGE)
                drains = [objects.drain_of(body) async for body in found]
            return drains

    async def mark(self, change: NodeChange) -> None:
        """Set the condition of a node, after the Event about it. If the patch fails, the retry
        makes no second Event, since it has the same name. In the reverse order an Event that failed
        would never be made, since the condition is set already.

        Raises:
            KubernetesError: the Event or the patch fails.
        """
        now, refused = _now(), None
        if change.event is not None:
            try:
                await self._tell(change, change.event, now)
            except RefusedError as error:
                refused = error  # the condition is what counts
        with _explained_as("patch the status of a node"):
            patch = objects.marked(change, now)
            await self._client.patch(_NODE.Status, change.node.name, patch)
        if refused is not None:
            raise refused

    async def _tell(self, change: NodeChange, event: NodeEvent, now: str) -> None:
        with _explained_as("create an Event"):
            body = objects.event(change.node, event, now)
            with _tolerate(CONFLICT):
                await self._client.create(_EVENT(body), namespace=objects.EVENTS)

    async def complete(self, drain: NodeDrain, message: str) -> None:
        """Say that a DrainRequest is served; nothing if it is gone.

        Raises:
            KubernetesError: it has changed meanwhile, or this is refused.
        """
        with _explained_as("patch the status of a DrainRequest"), _tolerate(NOT_FOUND):
            body = await self._client.get(_DRAIN, drain.name, namespace=drain.namespace)
            await self._client.patch(
                _DRAIN.Status,
                drain.name,
                objects.completed(body, message, _now()),
                namespace=drain.namespace,
                patch_type=PatchType.MERGE,
            )


def _client() -> AsyncClient:
    try:
        return AsyncClient(KubeConfig.from_env())
    except UNUSABLE as error:
        raise ConfigError(
            f"no usable kubeconfig or service account ({in_words(error)}): run this in a pod with "
            "a service account, or name a file in KUBECONFIG"
        ) from None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _explained_as(what: str) -> Iterator[None]:
    """Turns errors of the client into a sentence."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        answer = error.response
        # Only an error of the API server itself has a sentence of its own.
        why = (
            error if isinstance(error, ApiError) else f"{answer.status_code} {answer.reason_phrase}"
        )
        if answer.status_code in REFUSED:
            raise RefusedError(f"the API server does not let us {what}: {why}") from None
        if answer.is_client_error and answer.status_code not in PASSING:
            raise RefusedError(f"cannot {what}: the API server answered {why}") from None
        raise KubernetesError(f"cannot {what}: the API server answered {why}") from None
    except (httpx2.HTTPError, OSError) as error:
        why = in_words(error)
        raise KubernetesError(f"cannot {what}: no answer from the API server: {why}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # A proxy or a gateway answered, or the object has not the shape of its kind.
        why = in_words(error)
        raise KubernetesError(
            f"cannot {what}: the answer of the API server is not understood: {why}"
        ) from None


@contextmanager
def _tolerate(status: int) -> Iterator[None]:
    """Suppresses an HTTP error with this status."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        if error.response.status_code != status:
            raise
