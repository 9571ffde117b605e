"""The contract test kit: every installed plug-in passes it, and violations are found."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.plugins import broken_policies
from tmd.daemon.plugins import installed
from tmd.plugin import (
    DETECTOR_GROUP,
    POLICY_GROUP,
    Detector,
    DetectorConfig,
    Severity,
    Signal,
)
from tmd.testing import plugins as kit
from tmd.testing.plugins import BrokenContract, check_detector, check_policy
from tmd.testing.watching import longest_block

EXAMPLE = Path(__file__).parent / "example_distribution"


@pytest.mark.parametrize("point", installed(DETECTOR_GROUP), ids=lambda p: p.name)
async def test_every_installed_detector_keeps_the_contract(point):
    await check_detector(point)


@pytest.mark.parametrize("point", installed(POLICY_GROUP), ids=lambda p: p.name)
def test_every_installed_policy_keeps_the_contract(point):
    check_policy(point)


# --- each violation -------------------------------------------------------------------------------


class Sound(Detector):
    name = "sound"

    async def watch(self, ctx):
        while True:
            yield Signal("a.b", "host", Severity.INFO)
            await ctx.sleep(1)


class NoDefault(Sound):
    class Config(DetectorConfig, frozen=True, forbid_unknown_fields=True):
        limit: int


class AnyKey(Sound):
    class Config(DetectorConfig, frozen=True, forbid_unknown_fields=False):
        limit: int = 1


class NoReason(Sound):
    def supported(self):
        return ""


class NoReasonWith(Sound):
    def supported_with(self, config):
        return True


class Slow(Sound):
    def supported(self):
        time.sleep(0.05)


class SlowAtFirst(Sound):
    """Or the machine was busy."""

    calls = 0

    def supported(self):
        self.calls += 1
        if self.calls == 1:
            time.sleep(1.5 * kit.QUICK_S)


class Tool(Sound):
    """Asks a tool of a vendor each time."""

    def supported(self):
        time.sleep(1.5 * kit.QUICK_S)


class ExitsSupported(Sound):
    def supported(self):
        sys.exit(0)


class Exits(Sound):
    async def watch(self, ctx):
        await ctx.sleep(0)
        sys.exit(0)
        yield


class ExitsInTask(Sound):
    async def watch(self, ctx):
        async def tool():
            sys.exit(0)

        self.task = asyncio.create_task(tool())
        async for signal in super().watch(ctx):
            yield signal


class Ends(Sound):
    async def watch(self, ctx):
        return
        yield


class NoGenerator(Sound):
    def watch(self, ctx):
        return iter(())


class NoSignal(Sound):
    async def watch(self, ctx):
        yield "a.b"


class NoDot(Sound):
    async def watch(self, ctx):
        yield Signal("ab", "host", Severity.INFO)


class EmptyCode(Sound):
    async def watch(self, ctx):
        yield Signal(".", "host", Severity.INFO)


class NoEntity(Sound):
    async def watch(self, ctx):
        yield Signal("a.b", " ", Severity.INFO)


class NoText(Sound):
    async def watch(self, ctx):
        yield Signal("a.b", "host", Severity.INFO, message=5)  # type: ignore[arg-type]


class NoSeverity(Sound):
    async def watch(self, ctx):
        yield Signal("a.b", "host", "warning")  # type: ignore[arg-type]


class Late(Sound):
    """Begins well. Its subclasses break the contract later."""

    async def watch(self, ctx):
        yield Signal("a.b", "host", Severity.INFO)
        await ctx.sleep(60)


class EndsLate(Late):
    pass


class NoSignalLate(Late):
    async def watch(self, ctx):
        async for signal in super().watch(ctx):
            yield signal
        yield 42


class Stubborn(Sound):
    async def watch(self, ctx):
        try:
            yield Signal("a.b", "host", Severity.INFO)
            while True:
                await ctx.sleep(1)
        finally:
            await asyncio.sleep(1000)


class Floods(Sound):
    async def watch(self, ctx):
        while True:
            yield Signal("a.b", "host", Severity.INFO)


class Blocks(Sound):
    async def watch(self, ctx):
        while True:
            time.sleep(0.7)  # noqa: ASYNC251 - it is wrong on purpose
            yield Signal("a.b", "host", Severity.INFO)
            await ctx.sleep(60)


class Deaf(Sound):
    async def watch(self, ctx):
        while True:
            with suppress(asyncio.CancelledError):
                await ctx.sleep(0.01)
        yield


class Litters(Sound):
    async def watch(self, ctx):
        self.task = asyncio.create_task(asyncio.sleep(1000))
        async for signal in super().watch(ctx):
            yield signal


@pytest.mark.looptime
async def test_the_kit_takes_real_time_in_a_loop_with_virtual_time():
    """Timers of such a loop are over at once: a good detector would not end within its limit."""
    for _ in range(3):
        await kit.check_watch(Sound())


async def test_a_correct_detector_passes_the_kit():
    kit.check_config(Sound())
    kit.check_supported(Sound())
    await kit.check_watch(Sound())


@pytest.mark.parametrize(
    ("broken", "reason"), [(NoDefault, "has no default"), (AnyKey, "accepts any key")]
)
def test_the_kit_finds_a_broken_config(broken, reason):
    with pytest.raises(BrokenContract, match=reason):
        kit.check_config(broken())


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (NoReason, "no reason"),
        (NoReasonWith, "no reason"),
        (Slow, "took"),
        (ExitsSupported, r"raised SystemExit\(0\)"),
    ],
)
def test_the_kit_finds_a_broken_supported(broken, reason):
    with pytest.raises(BrokenContract, match=reason):
        kit.check_supported(broken(), within_s=0.01)


def test_a_supported_that_asks_a_slow_tool_each_time_blocks_the_daemon():
    """It may be slow once, though: the daemon calls it again and again."""
    kit.check_supported(SlowAtFirst())
    with pytest.raises(BrokenContract, match="on the event loop, again and again"):
        kit.check_supported(Tool())

    assert kit.QUICK_S <= 0.2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Ends, "ends"),
        (Exits, r"raised SystemExit\(0\)"),
        (ExitsInTask, r"raised SystemExit\(0\)"),
        (NoGenerator, "not an 'async def'"),
        (NoSignal, "no Signal"),
        (NoDot, "dotted code"),
        (EmptyCode, "dotted code"),
        (NoEntity, "name an entity"),
        (NoText, "Expected `str`, got `int`"),
        (NoSeverity, r"write Severity\.X"),
        (Blocks, "blocks the event loop for"),
        (EndsLate, "ends"),
        (NoSignalLate, "no Signal"),
        (Stubborn, "cannot be closed"),
        (Deaf, "cannot be closed"),
        (Floods, "signals at once"),
        (Litters, "leaves tasks behind"),
    ],
)
async def test_the_kit_finds_a_broken_watch(broken, reason):
    with pytest.raises(BrokenContract, match=reason):
        await kit.check_watch(broken(), close_s=0.1)


class Rests(Sound):
    """Takes its time, without blocking anything."""

    async def watch(self, ctx):
        await asyncio.sleep(0.4)
        async for shown in super().watch(ctx):
            yield shown


async def test_a_stall_of_the_whole_process_is_not_the_detectors_fault():
    """As a garbage collection of a large test suite, or a machine that runs something else."""
    held = []
    keep_lock = ctypes.PyDLL(None).usleep  # unlike those of CDLL, its calls keep the lock
    stall = threading.Timer(0.1, lambda: held.append(keep_lock(900_000)))
    stall.start()
    await kit.check_watch(Rests())
    stall.join()

    assert held == [0]


def test_a_block_is_what_holds_up_the_loop_and_no_other_thread():
    loop = [(1.0, 2.0), (2.0, 2.7)]

    assert longest_block(loop, []) == 1.0
    assert longest_block(loop, [(0.5, 1.25), (1.5, 2.0)]) == pytest.approx(0.7)
    assert longest_block([], []) == 0.0


class Asks(Sound):
    """Asks a server of the author's test, and yields what it answers."""

    def __init__(self, path):
        self.path = path

    async def watch(self, ctx):
        reader, writer = await asyncio.open_unix_connection(self.path)
        code = (await reader.readline()).decode().strip()
        writer.close()
        while True:
            yield Signal(code, "host", Severity.INFO)
            await ctx.sleep(60)


async def test_a_detector_may_ask_a_server_in_the_loop_of_the_test(tmp_path):
    """Blocked, that loop would not answer, and nothing would be found."""

    async def answer(_, writer):
        writer.write(b"notdotted\n")
        writer.close()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(answer, path):
        with pytest.raises(BrokenContract, match="dotted code"):
            await kit.check_watch(Asks(path), close_s=1.0)


async def test_the_kit_finds_a_plug_in_that_cannot_be_loaded():
    with pytest.raises(BrokenContract, match="cannot be imported"):
        await check_detector(EntryPoint("gone", "no_such_module:X", DETECTOR_GROUP))


def test_the_kit_finds_a_plug_in_that_imports_torch(tmp_path, monkeypatch):
    """A module of that name is enough: importing the real one is slow."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "heavy.py").write_text("import torch\nX = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BrokenContract, match="heavy imports torch"):
        kit.check_import(EntryPoint("heavy", "heavy:X", DETECTOR_GROUP))


def test_the_kit_finds_a_plug_in_that_imports_more_of_tmd():
    with pytest.raises(BrokenContract, match=r"imports tmd\.\w+: a plug-in imports tmd.plugin"):
        kit.check_import(EntryPoint("sound", f"{__name__}:Sound", DETECTOR_GROUP))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (broken_policies.Greedy, "empty cluster"),
        (broken_policies.Words, "words: .* which is not a Verdict"),
        (broken_policies.Nothing, "nothing: .* returned None, which is no list of Verdict"),
        (broken_policies.Later, "later: .* async"),
        (broken_policies.Exits, r"exits: .* SystemExit\(3\)"),
        (broken_policies.Misfit, "misfit: .* Expected `str`, got `int`"),
        (broken_policies.Fickle, "otherwise when it is asked again"),
        (broken_policies.Astray, "h3/job/0.a.* holds no rank"),
        (broken_policies.Loose, "accepts any key"),
    ],
)
def test_the_kit_finds_a_broken_policy(policy, reason):
    point = EntryPoint(policy.name, f"{policy.__module__}:{policy.__name__}", POLICY_GROUP)
    with pytest.raises(BrokenContract, match=reason):
        check_policy(point)


# --- a third-party distribution -------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign_env(tmp_path_factory):
    """The environment of a process that sees the example distribution, which pip has installed into
    a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "it", tmp_path_factory.mktemp("target")
    shutil.copytree(EXAMPLE, source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    command += ["--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TMD_")}
    return {**clean, "PYTHONPATH": str(target), "TMD_CONFIG": os.devnull}


def python(foreign_env, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=foreign_env,
        check=False,
    )


def test_a_new_detector_only_observes_and_a_new_policy_is_off(foreign_env):
    done = python(foreign_env, "-m", "tmd.cli", "plugins", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}

    assert rows["load"]["distribution"] == "tmd-example 1.2.3"
    assert (rows["load"]["use"], rows["drain_overloaded"]["use"]) == ("observe", "off")


def test_the_example_plug_ins_keep_the_contract(foreign_env):
    code = (
        "import asyncio; from tmd.daemon.plugins import installed\n"
        "from tmd.testing.plugins import check_detector, check_policy\n"
        "points = {p.name: p for g in ('tmd.detectors', 'tmd.policies') for p in installed(g)}\n"
        "asyncio.run(check_detector(points['load']))\n"
        "check_policy(points['drain_overloaded']); print('kept')"
    )

    assert python(foreign_env, "-c", code).stdout.strip() == "kept"


def test_the_example_detector_reports(foreign_env):
    """Every host has a load above minus one."""
    env = {**foreign_env, "TMD_DETECTORS__LOAD__LIMIT": "-1", "TMD_PLUGINS__ALLOW": '["load"]'}
    done = python(env, "-m", "tmd.cli", "scan", "--json", "--seconds", "2")

    assert [a["code"] for a in json.loads(done.stdout)["alerts"]] == ["load.high"], done.stderr


def test_the_example_policy_drains_an_overloaded_host(foreign_env):
    code = (
        "from tmd_example import DrainOverloaded\n"
        "from tests.plugins.test_policies import alert, host, view\n"
        "full = host('h1', alerts=(alert('h1', code='load.high'),))\n"
        "print(*(v.worker for v in DrainOverloaded().decide(view(full, host('h2')))))"
    )

    assert python(foreign_env, "-c", code).stdout.split() == ["h1/job/0.a"]
