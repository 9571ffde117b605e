"""An API server of Kubernetes in a thread, as far as the operator sees one.

It follows the API conventions: a resource version for each write, lists in pages, watches from a
version on with 410 for one that is forgotten, merge patches, strategic merge patches of built-in
resources only, status as a subresource, 409 for names that exist and for versions that are stale,
401 without the token and 403 without the right. It stores what it gets and runs no controller.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import web

Body = dict[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace (empty for none), name."""
TOKEN = "token-of-the-operator"
CORE = {"nodes": ("Node", False), "events": ("Event", True), "namespaces": ("Namespace", False)}
DRAIN = ("nvsentinel.nvidia.com", "v1alpha1", "drainrequests", "DrainRequest")
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": code,
        }


class Change(NamedTuple):
    version: int
    kind: str
    resource: str
    body: Body


class Request(NamedTuple):
    verb: str
    resource: str
    name: str


def merged(old: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def merged_by_type(old: Body, patch: Body) -> Body:
    """A strategic merge: of all lists of a node only the conditions are patched here."""
    known = {c["type"]: c for c in old.get("status", {}).get("conditions", [])}
    new = copy.deepcopy(patch)
    conditions = new.get("status", {}).pop("conditions", [])
    for condition in conditions:
        if condition.get("$patch") == "delete":
            known.pop(condition["type"], None)
        else:
            known[condition["type"]] = {**known.get(condition["type"], {}), **condition}
    found = merged(old, new)
    found.setdefault("status", {})["conditions"] = list(known.values())
    return found


class Store:
    """The objects, and every change since the last compaction. Guarded by one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[Key, Body] = {}
        self.changes: list[Change] = []
        self.version = 1
        self.oldest = 0
        """Watches from an earlier version get 410."""
        self.changed: Callable[[], None] = lambda: None

    def write(self, key: Key, body: Body) -> Body:
        with self.lock:
            old = self.objects.get(key)
            if old is not None and {**old, "metadata": 0} == {**body, "metadata": 0}:
                return old
            self.version += 1
            body = copy.deepcopy(body)
            about = body["metadata"]
            about["resourceVersion"] = str(self.version)
            about.setdefault("uid", str(uuid.uuid4()))
            self.objects[key] = body
            self._tell("ADDED" if old is None else "MODIFIED", key[0], body)
            return body

    def remove(self, key: Key) -> None:
        with self.lock:
            body = copy.deepcopy(self.objects.pop(key))
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            self._tell("DELETED", key[0], body)

    def compact(self) -> None:
        """Forget what was changed, as etcd does after five minutes."""
        with self.lock:
            self.changes.clear()
            self.oldest = self.version

    def _tell(self, kind: str, resource: str, body: Body) -> None:
        self.changes.append(Change(self.version, kind, resource, copy.deepcopy(body)))
        self.changed()


class ApiServer:
    """Use it as a context; the methods are for any thread."""

    def __init__(self, *, with_drains: bool = True) -> None:
        self.store = Store()
        self.with_drains = with_drains
        self.requests: list[Request] = []
        self.patches: list[tuple[Key, Body]] = []
        """With the object that each was for."""
        self.rights: set[tuple[str, str]] | None = None
        self.denies = 403
        """Status of the answer to a request without a right."""
        """Verb and resource (``nodes/status``); ``None`` for all."""
        self.token = TOKEN
        """Empty: anybody may ask. kubectl sends a token over TLS only."""
        self.garbled: str | None = None
        """What every list is instead of what it should be, with status 200."""
        self.held: Request | None = None
        """A request that gets no answer, once it has come: see ``is_held``."""
        self.is_held = threading.Event()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._wakes: set[asyncio.Event] = set()
        self._streams: set[asyncio.Task[Any]] = set()
        self.store.changed = self._changed

    def __enter__(self) -> ApiServer:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_watches()
        self._call(self._runner.cleanup())
        self._call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- for tests ---

    def put(self, resource: str, name: str, *, namespace: str = "", **parts: Any) -> Body:
        """Create or replace an object."""
        kind, version = _kinds()[resource]
        about = {"name": name, **({"namespace": namespace} if namespace else {})}
        about.update(parts.pop("metadata", {}))
        body = {"apiVersion": version, "kind": kind, "metadata": about, **parts}
        return self.store.write((resource, namespace, name), body)

    def node(self, name: str, *, cordoned: bool = False, **about: Any) -> Body:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        with self.store.lock:
            old = self.store.objects.get(("nodes", "", name), {})
            status = old.get("status", {"conditions": [ready]})
            about = {**old.get("metadata", {}), **about}
            spec = {"unschedulable": True} if cordoned else {}
            return self.put("nodes", name, metadata=about, spec=spec, status=status)

    def drain(self, name: str, node: str, **spec: Any) -> Body:
        about = {"generation": 1}
        return self.put(
            "drainrequests",
            name,
            namespace="nvsentinel",
            metadata=about,
            spec={"nodeName": node, **spec},
        )

    def get(self, resource: str, name: str, namespace: str = "") -> Body:
        with self.store.lock:
            return copy.deepcopy(self.store.objects[resource, namespace, name])

    def all(self, resource: str) -> list[Body]:
        with self.store.lock:
            return [
                copy.deepcopy(b) for (r, _, _), b in self.store.objects.items() if r == resource
            ]

    def condition(self, resource: str, name: str, kind: str, namespace: str = "") -> Body:
        status = self.get(resource, name, namespace).get("status", {})
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    def drop_watches(self) -> None:
        """Cut every watch, as a restart of the server does."""

        async def drop() -> None:
            for task in self._streams:
                task.cancel()

        self._call(drop())

    def kubeconfig(self) -> str:
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "t",
                "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
                "clusters": [{"name": "t", "cluster": {"server": self.url}}],
                "users": [{"name": "t", "user": {"token": TOKEN}}],
            }
        )

    # --- the server ---

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/version", _answer({"major": "1", "minor": "34"}))
        app.router.add_get("/api", _answer({"kind": "APIVersions", "versions": ["v1"]}))
        app.router.add_get("/apis", self._groups)
        app.router.add_get("/api/v1", self._core)
        for base in ("/api/v1", f"/apis/{DRAIN[0]}/{DRAIN[1]}"):
            for space in ("", "/namespaces/{namespace}"):
                kind = f"{base}{space}/{{resource}}"
                app.router.add_get(kind, self._list)
                app.router.add_post(kind, self._create)
                app.router.add_get(f"{kind}/{{name}}", self._get)
                app.router.add_patch(f"{kind}/{{name}}", self._patch)
                app.router.add_get(f"{kind}/{{name}}/{{part:status}}", self._get)
                app.router.add_patch(f"{kind}/{{name}}/{{part:status}}", self._patch)
        app.router.add_get(f"/apis/{DRAIN[0]}/{DRAIN[1]}", self._drains)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def _changed(self) -> None:
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for event in self._wakes:
            event.set()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if "resource" in request.match_info:
                await self._admit(request)
            return await handler(request)
        except Refused as error:
            return _json(error.status, status=error.code)

    async def _admit(self, request: web.Request) -> None:
        place = request.match_info
        resource, name = place["resource"], place.get("name", "")
        is_drain = request.path.startswith("/apis/")
        if is_drain and not self.with_drains:
            raise web.HTTPNotFound(text="404 page not found")
        if resource not in ({DRAIN[2]} if is_drain else CORE):
            raise web.HTTPNotFound(text="404 page not found")
        verb = {"POST": "create", "PATCH": "patch"}.get(request.method, "get" if name else "list")
        if verb == "list" and request.query.get("watch") == "true":
            verb = "watch"
        asked = resource + (f"/{place['part']}" if "part" in place else "")
        made = Request(verb, asked, name)
        self.requests.append(made)
        if self.rights is not None and (verb, asked) not in self.rights:
            text = f'{asked} is forbidden: User "operator" cannot {verb} resource "{asked}"'
            raise Refused(self.denies, "Forbidden" if self.denies == 403 else "Invalid", text)
        if made == self.held:
            self.is_held.set()
            await asyncio.Event().wait()

    async def _groups(self, _: web.Request) -> web.Response:
        version = {"groupVersion": f"{DRAIN[0]}/{DRAIN[1]}", "version": DRAIN[1]}
        group = {"name": DRAIN[0], "versions": [version], "preferredVersion": version}
        return _json({"kind": "APIGroupList", "groups": [group] if self.with_drains else []})

    async def _core(self, _: web.Request) -> web.Response:
        found = [_resource(plural, *how) for plural, how in CORE.items()]
        found.append({**_resource("nodes", "Node", False), "name": "nodes/status"})
        return _json({"kind": "APIResourceList", "resources": found})

    async def _drains(self, _: web.Request) -> web.Response:
        if not self.with_drains:
            raise web.HTTPNotFound(text="404 page not found")
        found = [_resource(DRAIN[2], DRAIN[3], True)]
        found.append({**found[0], "name": f"{DRAIN[2]}/status"})
        return _json({"kind": "APIResourceList", "resources": found})

    async def _get(self, request: web.Request) -> web.Response:
        return _json(self._known(request)[1])

    def _known(self, request: web.Request) -> tuple[Key, Body]:
        key = _key(request)
        with self.store.lock:
            body = self.store.objects.get(key)
        if body is None:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return key, copy.deepcopy(body)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request)
        if self.garbled is not None:
            return web.Response(text=self.garbled, content_type="application/json")
        with self.store.lock:
            found = self._selected(request, (b for _, b in sorted(self.store.objects.items())))
            version = str(self.store.version)
        start = int(request.query.get("continue", 0))
        limit = int(request.query.get("limit", 0)) or len(found)
        about = {"resourceVersion": version}
        if len(found) > start + limit:
            about["continue"] = str(start + limit)
        # Items of a list carry neither kind nor version.
        items = [
            {k: v for k, v in b.items() if k not in ("kind", "apiVersion")}
            for b in found[start : start + limit]
        ]
        kind, api = _kinds()[request.match_info["resource"]]
        return _json({"kind": f"{kind}List", "apiVersion": api, "metadata": about, "items": items})

    def _selected(self, request: web.Request, bodies: Iterable[Body]) -> list[Body]:
        place = request.match_info
        kind = _kinds()[place["resource"]][0]
        labels = [p.partition("=") for p in request.query.get("labelSelector", "").split(",") if p]
        return [
            b
            for b in bodies
            if b["kind"] == kind
            and place.get("namespace", "") in ("", b["metadata"].get("namespace", ""))
            and all(_has(b, name, value) for name, _, value in labels)
        ]

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        at, wake = int(request.query.get("resourceVersion", 0)), asyncio.Event()
        self._wakes.add(wake)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            while True:
                wake.clear()
                with self.store.lock:
                    news = [c for c in self.store.changes if c.version > at]
                    is_late = at < self.store.oldest
                    at = max(at, self.store.version)
                if is_late:
                    gone = Refused(410, "Expired", "too old resource version")
                    await _send(response, "ERROR", gone.status)
                    return response
                for change in news:
                    if self._selected(request, [change.body]):
                        await _send(response, change.kind, change.body)
                await wake.wait()
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._wakes.discard(wake)
            self._streams.discard(task)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = request.match_info
        key = (place["resource"], place.get("namespace", ""), body["metadata"]["name"])
        with self.store.lock:
            if key in self.store.objects:
                raise Refused(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
            return _json(self.store.write(key, body), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        patch, how = await request.json(), request.content_type
        with self.store.lock:
            key, old = self._known(request)
            self.patches.append((key, patch))
            stated = patch.get("metadata", {})
            if stated.get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                raise Refused(409, "Conflict", "the object has been modified")
            if stated.get("uid") not in (None, old["metadata"]["uid"]):
                raise Refused(422, "Invalid", "metadata.uid: field is immutable")
            if how == MERGE:
                new = merged(old, patch)
            elif how == STRATEGIC and key[0] in CORE:
                new = merged_by_type(old, patch)
            else:
                raise Refused(415, "UnsupportedMediaType", f"{how} of {key[0]}")
            # The status subresource keeps the spec, but not labels; the other one keeps the status.
            kept = "spec" if "part" in request.match_info else "status"
            body = {k: v for k, v in new.items() if k != kept}
            if kept in old:
                body[kept] = old[kept]
            return _json(self.store.write(key, body))


def _kinds() -> dict[str, tuple[str, str]]:
    core = {plural: (kind, "v1") for plural, (kind, _) in CORE.items()}
    return {**core, DRAIN[2]: (DRAIN[3], f"{DRAIN[0]}/{DRAIN[1]}")}


def _key(request: web.Request) -> Key:
    place = request.match_info
    return place["resource"], place.get("namespace", ""), place["name"]


def _has(body: Body, name: str, value: str) -> bool:
    labels = body["metadata"].get("labels", {})
    return name in labels and value in ("", labels[name])


def _resource(plural: str, kind: str, namespaced: bool) -> Body:
    verbs = ["create", "get", "list", "patch", "watch"]
    return {
        "name": plural,
        "singularName": kind.lower(),
        "kind": kind,
        "namespaced": namespaced,
        "verbs": verbs,
    }


def _json(body: Body, status: int = 200) -> web.Response:
    # Without the charset that aiohttp would name: clients compare.
    headers = {"Content-Type": "application/json"}
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers)


def _answer(body: Body) -> Any:
    async def handler(_: web.Request) -> web.Response:
        return _json(body)

    return handler


async def _send(response: web.StreamResponse, kind: str, body: Body) -> None:
    with suppress(ConnectionResetError):
        await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
