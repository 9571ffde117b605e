"""How soon a rank that waits in a collective for a live peer is free once its epoch is given up."""

from __future__ import annotations

import threading
import time
from typing import Any

from bench.measure import Report, options, parsed, summary
from tests.fabric.circle import circle
from tests.fabric.test_abort import allreduce

LIMIT_S = 0.1


def once() -> float:
    """Seconds from the poison to the end of the wait."""
    with circle(2) as c:
        c.group()
        c.allreduce()
        waits = c.fabrics[0]
        ended: list[float] = []

        def wait() -> None:
            allreduce(c, waits, wait=True)
            ended.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        while not waits.waiting:
            time.sleep(0.001)
        at = time.monotonic()
        waits.poison("enough")
        thread.join(30)
        return ended[0] - at


def main() -> int:
    parser = options("abort", __doc__, repeats=50)
    args = parsed(parser)
    if args.quick:
        args.repeats = 1
    report = Report("abort", args)
    seconds = [once() for _ in range(args.repeats)]
    facts: dict[str, Any] = summary(seconds)
    report.row("from giving up to being free", facts, "seconds")
    report.target(f"at most {LIMIT_S} s", facts["max"], LIMIT_S, at_least=False)
    return report.finish(seconds, {"abort_s": facts})


if __name__ == "__main__":
    raise SystemExit(main())
