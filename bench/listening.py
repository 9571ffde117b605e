"""A subscriber of alerts and records, and when each message came."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import redis

WAIT_S = 20.0


class Heard(NamedTuple):
    at: float
    alert: dict[str, Any] | None
    """``None``: a record was stored."""


class Subscriber:
    """Closed by ``with``. Listens in a thread, so that nothing waits for the benchmark."""

    def __init__(self, url: str, cluster: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.channel = f"tmd:{cluster}:alerts"
        self._jobs = f"{{tmd:{cluster}}}:wake:observers"
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._pubsub = self.client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(self.channel, self._jobs)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._end = threading.Event()

    def __enter__(self) -> Subscriber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._pubsub.close()
        self.client.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            message = self._pubsub.get_message(timeout=0.2)
            at = time.perf_counter()
            if message is None:
                continue
            if message["channel"].decode() == self.channel:
                self._heard.put(Heard(at, msgspec.json.decode(message["data"])))
            elif message["data"].startswith(b"jobs "):
                self._heard.put(Heard(at, None))

    def until(self, wanted: Callable[[Heard], bool]) -> Heard:
        """The next message for which ``wanted`` holds.

        Raises:
            TimeoutError: there was none.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                message = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError("the subscriber received nothing of the kind") from None
            if wanted(message):
                return message
