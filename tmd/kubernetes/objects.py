"""Objects of the API server, as they are sent, and the values that decisions use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tmd.core.planning.kubernetes import (
    COMPLETE,
    CONDITION,
    HOST,
    Condition,
    KubernetesNode,
    NodeChange,
    NodeDrain,
    NodeEvent,
)

Object = Mapping[str, Any]

GROUP, VERSION, KIND, PLURAL = "nvsentinel.nvidia.com", "v1alpha1", "DrainRequest", "drainrequests"
"""NVSentinel's custom resource."""
EVENTS = "default"
"""The namespace of Events about nodes, which have none."""
ME = "tmd-operator"


def node_of(body: Object, labels: Mapping[str, str | None] | None = None) -> KubernetesNode:
    """A node, from its object. ``labels``: those that a selected one has (``None``: any value)."""
    about = body["metadata"]
    found = _condition(_part(body, "status").get("conditions"), CONDITION)
    return KubernetesNode(
        name=about["name"],
        uid=about.get("uid") or "",
        cordoned=bool(_part(body, "spec").get("unschedulable")),
        host=(about.get("annotations") or {}).get(HOST) or "",
        condition=None if found is None else _read(found),
        selected=_has(about.get("labels") or {}, labels or {}),
    )


def drain_of(body: Object) -> NodeDrain:
    """A DrainRequest, from its object. Its CRD may lack every field but the node."""
    about, spec = body["metadata"], _part(body, "spec")
    done = _condition(_part(body, "status").get("conditions"), COMPLETE)
    return NodeDrain(
        namespace=about.get("namespace") or "",
        name=about["name"],
        node=spec.get("nodeName") or "",
        reason=spec.get("reason") or spec.get("checkName") or "",
        complete=done is not None and done.get("status") == "True",
    )


def marked(change: NodeChange, now: str) -> dict[str, Any]:
    """A strategic merge patch of the status of a node. The right to send one covers all of the
    status, and the labels; this holds one condition and nothing else. Conditions are merged by
    their type, so that those of others stay. A node that has replaced ``change.node`` refuses it:
    its UID differs."""
    new = change.condition
    condition = {
        "type": CONDITION,
        "status": new.status,
        "reason": new.reason,
        "message": new.message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": new.since or now,
    }
    same = {"metadata": {"uid": change.node.uid}} if change.node.uid else {}
    return {**same, "status": {"conditions": [condition]}}


def completed(body: Object, message: str, now: str) -> dict[str, Any]:
    """A merge patch of the status of a DrainRequest. It holds all conditions, since a custom
    resource knows no other merge, and fails if the object has changed since ``body``."""
    about = body["metadata"]
    others = [c for c in _part(body, "status").get("conditions") or () if c.get("type") != COMPLETE]
    condition = {
        "type": COMPLETE,
        "status": "True",
        "reason": "RanksMoved",
        "message": message,
        "lastTransitionTime": now,
        "observedGeneration": about.get("generation") or 0,
    }
    version = {"resourceVersion": about["resourceVersion"]}
    return {"metadata": version, "status": {"conditions": [*others, condition]}}


def event(about: KubernetesNode, what: NodeEvent, now: str) -> dict[str, Any]:
    """An Event about a node. Like the kubelet, it uses the name of the node as the UID."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": what.name, "namespace": EVENTS},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Node",
            "name": about.name,
            "uid": about.name,
        },
        "type": "Warning" if what.warns else "Normal",
        "reason": what.reason,
        "message": what.message,
        "source": {"component": ME},
        "reportingComponent": ME,
        "reportingInstance": ME,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _has(labels: Mapping[str, str], wanted: Mapping[str, str | None]) -> bool:
    return all(n in labels and v in (None, labels[n]) for n, v in wanted.items())


def _part(body: Object, name: str) -> Object:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _condition(conditions: Sequence[Object] | None, kind: str) -> Object | None:
    return next((c for c in conditions or () if c.get("type") == kind), None)


def _read(found: Object) -> Condition:
    return Condition(
        status=found.get("status") or "Unknown",
        reason=found.get("reason") or "",
        message=found.get("message") or "",
        since=found.get("lastTransitionTime") or "",
    )
