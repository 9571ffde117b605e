"""The contract of plug-ins as checks that their authors call in their own tests.

Each raises :class:`BrokenContract` with what is wrong. tmd's own tests call them for every plug-in
that is installed, built-in or not::

    @pytest.mark.parametrize("point", installed("tmd.detectors"), ids=lambda p: p.name)
    async def test_contract(point):
        await check_detector(point)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import msgspec

from tmd.config import Plugins
from tmd.core.alerts.quota import fitted
from tmd.core.values.errors import PluginError
from tmd.core.values.reasons import in_words
from tmd.daemon.foreign_code import PluginExit, contained_exit
from tmd.daemon.plugins import load
from tmd.daemon.policy_runner import verdicts_of
from tmd.plugin import (
    ClusterView,
    Detector,
    DetectorConfig,
    Policy,
    PolicyConfig,
    Severity,
    Signal,
    State,
    Verdict,
)
from tmd.testing.cluster import failing_job
from tmd.testing.watching import BrokenContract as BrokenContract
from tmd.testing.watching import HurriedContext, watched

QUICK_S = 0.2
"""Limit for ``supported()``, which the daemon calls again and again, on the event loop."""
TRIES = 5
"""Calls of which the swiftest counts: others may take the processor meanwhile."""
CLOSE_S = 10.0
CODE = re.compile(r"[\w-]+(\.[\w-]+)+")


async def check_detector(point: EntryPoint) -> None:
    """Check a detector: it loads, is configured, reports whether it works, runs and closes.

    Raises:
        BrokenContract: the first violation.
    """
    detector = cast(Detector, _loaded(point, Detector))
    check_config(detector)
    check_supported(detector)
    check_import(point)
    if detector.supported_with(detector.Config()) is None:
        await check_watch(detector)


def check_policy(point: EntryPoint) -> None:
    """Check a policy: it loads and is configured, and demands nothing of an empty cluster. Of a job
    with faults it demands verdicts about ranks of that job, and the same when it is asked again.

    Raises:
        BrokenContract: the first violation.
    """
    policy = cast(Policy, _loaded(point, Policy))
    check_config(policy)
    check_import(point)
    if _verdicts(policy, ClusterView()):
        raise BrokenContract(f"{point.name} demands something of an empty cluster")
    view = failing_job()
    first, again = (_verdicts(policy, view) for _ in range(2))
    if first != again:
        raise BrokenContract(f"{point.name} decides otherwise when it is asked again")
    known = {(job.job, m.worker) for job in view.jobs for m in job.membership.members}
    for verdict in first:
        if (verdict.job, verdict.worker) not in known:
            raise BrokenContract(
                f"{point.name} demands something of {verdict.worker!r} of the job "
                f"{verdict.job!r}, which holds no rank"
            )


def _verdicts(policy: Policy, view: ClusterView) -> list[Verdict]:
    try:
        return verdicts_of(policy, view)
    except (TypeError, PluginExit) as error:
        raise BrokenContract(f"{policy.name}: {in_words(error)}") from error


def check_config(plugin: Detector | Policy) -> None:
    """Every key of ``Config`` has a default, and unknown keys are refused."""
    base = DetectorConfig if isinstance(plugin, Detector) else PolicyConfig
    try:
        config: object = plugin.Config()
    except TypeError as error:
        raise BrokenContract(f"a key of {plugin.name} has no default: {in_words(error)}") from error
    if not isinstance(config, base):
        raise BrokenContract(f"the Config of {plugin.name} does not derive from {base.__name__}")
    try:
        msgspec.convert({"no-such-key": 1}, plugin.Config)
    except msgspec.ValidationError:
        return
    raise BrokenContract(
        f"{plugin.name} accepts any key, so that a misspelt one goes unnoticed: "
        "derive its Config with forbid_unknown_fields=True"
    )


def check_supported(detector: Detector, within_s: float = QUICK_S) -> None:
    """``supported()`` and ``supported_with()`` give a reason or ``None``, and soon. The swiftest of
    a few calls counts."""
    config = detector.Config()
    for name, ask in (
        ("supported()", detector.supported),
        ("supported_with()", partial(detector.supported_with, config)),
    ):
        call = f"{name} of {detector.name}"
        took = [_answer_time(call, ask)]
        while min(took) > within_s and len(took) < TRIES:
            took.append(_answer_time(call, ask))
        if min(took) > within_s:
            raise BrokenContract(
                f"{call} took {min(took):.2f} s: it is called on the event loop, again and again "
                "while it gives a reason"
            )


def _answer_time(call: str, ask: Callable[[], object]) -> float:
    """The time that ``ask`` takes, in seconds."""
    started = time.monotonic()
    try:
        with contained_exit():
            reason = ask()
    except PluginExit as error:
        raise BrokenContract(f"{call} {in_words(error)}") from error
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise BrokenContract(f"{call} gives {reason!r}, no reason")
    return time.monotonic() - started


def check_import(point: EntryPoint) -> None:
    """Importing the plug-in brings neither torch nor redis into the daemon, and of tmd only
    :mod:`tmd.plugin`."""
    code = (
        "import sys, tmd.plugin; from importlib.metadata import EntryPoint\n"
        "before = set(sys.modules)\n"
        "EntryPoint(*sys.argv[1:]).load()\n"
        "new = [name for name in sys.modules if name not in before]\n"
        "print(*(n for n in new if n in ('torch', 'redis') or n.partition('.')[0] == 'tmd'))"
    )
    command = [sys.executable, "-P", "-c", code, point.name, point.value, point.group]
    # From this process's import path, not from its working directory.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, (*given, *sys.path)))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode != 0:
        raise BrokenContract(f"{point.name} cannot be imported alone: {done.stderr}")
    if found := done.stdout.split():
        raise BrokenContract(
            f"{point.name} imports {found[0]}: a plug-in imports tmd.plugin, and neither torch, "
            "redis nor anything else of tmd"
        )


async def check_watch(
    detector: Detector, config: DetectorConfig | None = None, close_s: float = CLOSE_S
) -> None:
    """``watch()`` can be started and closed in time; it goes on, does not block, yields signals
    only, and leaves no task. Its first sleeps are over at once, so that it shows more than its
    first look. It runs in a thread with an event loop of its own."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = config if config is not None else detector.Config()
        context = partial(HurriedContext, chosen, state_dir=Path(folder))
        await watched(detector, context, close_s, _check_signal)


def _check_signal(detector: Detector, shown: object) -> None:
    if not isinstance(shown, Signal):
        raise BrokenContract(f"{detector.name} yields {shown!r}, no Signal")
    try:
        fitted(shown)
    except msgspec.ValidationError as error:
        raise BrokenContract(f"{detector.name} yields {shown!r}: {in_words(error)}") from error
    if not isinstance(shown.severity, Severity) or not isinstance(shown.state, State):
        raise BrokenContract(f"{detector.name} yields {shown!r}: write Severity.X and State.X")
    if not CODE.fullmatch(shown.code) or not shown.entity.strip():
        raise BrokenContract(
            f"{detector.name} yields {shown!r}: write a dotted code, such as load.high, and name "
            "an entity"
        )


def _loaded(point: EntryPoint, base: type) -> object:
    try:
        return load([point], base, Plugins())[point.name][0]
    except PluginError as error:
        raise BrokenContract(str(error)) from error
