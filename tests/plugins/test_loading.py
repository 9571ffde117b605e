"""Finding, checking and refusing plug-ins."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from tmd.config import Plugins, parse
from tmd.core.values.errors import ConfigError, PluginError
from tmd.daemon.foreign_code import BLOCKS_S
from tmd.daemon.plugins import installed, load, load_detectors, load_policies, strangers
from tmd.plugin import (
    DETECTOR_GROUP,
    POLICY_GROUP,
    Detector,
    DetectorConfig,
    Policy,
    PolicyConfig,
    Strategy,
)

HERE = __name__


class KeenConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    limit: int = 3


class Keen(Detector):
    name = "keen"
    Config: ClassVar[type[DetectorConfig]] = KeenConfig

    async def watch(self, ctx):
        yield


class RenamedConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    poll_s: float = 1.0


class Renamed(Keen):
    name = "renamed"
    Config = RenamedConfig


class Odd(Policy):
    name = "odd"

    def decide(self, view):
        return ()


class ChoosyConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True):
    limit_s: float = 3.0


class Choosy(Odd):
    name = "choosy"
    Config = ChoosyConfig


class Strict(Choosy):
    name = "strict"

    def __init__(self, config=None):
        if config is not None and config.limit_s < 1:
            raise ValueError("limit_s is too low")
        super().__init__(config)


class Unfinished(Detector):
    name = "unfinished"


class Unconfigurable(Keen):
    name = "unconfigurable"
    Config = dict  # type: ignore[assignment]


class Exploding(Keen):
    name = "exploding"

    def __init__(self):
        raise RuntimeError("no licence")


class Ending(Keen):
    name = "ending"

    def __init__(self):
        raise SystemExit(0)


class Slow(Keen):
    name = "slow"

    def __init__(self):
        time.sleep(1.2 * BLOCKS_S)


class Leaving(Odd):
    name = "leaving"

    def __init__(self, config=None):
        if config is not None:
            raise SystemExit(0)
        super().__init__(config)


def point(name, target=None):
    return EntryPoint(name=name, value=f"{HERE}:{target or name.capitalize()}", group="g")


@pytest.fixture
def settings():
    def make(**changes):
        settings, problems = parse(changes)
        assert settings is not None, problems
        return settings

    return make


# --- the contract, for every plug-in that is installed --------------------------------------------


def test_shipped_plug_ins_are_found():
    assert {p.name for p in installed(DETECTOR_GROUP)} >= {"trainer"}
    assert {p.name for p in installed(POLICY_GROUP)} >= {
        "replace_failed",
        "drain_requested",
        "observe_only",
    }


@pytest.mark.parametrize("entry", installed(DETECTOR_GROUP), ids=lambda e: e.name)
def test_every_detector_keeps_the_contract(entry):
    """It can be created, has a default configuration, and reports whether it can work here."""
    detector, _ = load([entry], Detector, Plugins())[entry.name]

    assert isinstance(detector.Config(), DetectorConfig)
    assert detector.supported() is None or detector.supported()


@pytest.mark.parametrize("entry", installed(POLICY_GROUP), ids=lambda e: e.name)
def test_every_policy_keeps_the_contract(entry):
    """It gives no verdict on an empty cluster."""
    from tmd.plugin import ClusterView

    policy, _ = load([entry], Policy, Plugins())[entry.name]

    assert list(policy.decide(ClusterView())) == []


def test_shipped_plug_ins_import_only_the_public_api():
    """In a fresh process they load nothing of tmd beyond tmd.plugin and its dependencies."""
    code = (
        "import sys, tmd_detectors.trainer, tmd_policies.replace_failed\n"
        "import tmd_detectors.nic.detector, tmd_detectors.host.detector\n"
        "import tmd_detectors.xid.detector, tmd_detectors.nvml.detector\n"
        "import tmd_detectors.exec.detector, tmd_detectors.straggler\n"
        "import tmd_policies.drain_requested, tmd_policies.observe_only\n"
        "import tmd_policies.drain_degraded, tmd_policies.rebalance_stragglers\n"
        "import tmd_policies.rebalance_periodic\n"
        "print(*sorted(m for m in sys.modules if m.startswith('tmd')))\n"
        "assert 'torch' not in sys.modules and 'redis' not in sys.modules"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    ).stdout.split()

    ours = {m for m in out if m.split(".")[0] == "tmd"}
    assert ours == {
        "tmd",
        "tmd.boot",
        "tmd.child",
        "tmd.core",
        "tmd.core.values",
        "tmd.core.values.numbers",
        "tmd.core.values.alert",
        "tmd.core.values.checkpoints",
        "tmd.core.values.demands",
        "tmd.core.values.errors",
        "tmd.core.values.host_index",
        "tmd.core.values.membership",
        "tmd.core.values.reasons",
        "tmd.core.values.snapshots",
        "tmd.core.values.breaker_state",
        "tmd.core.values.model",
        "tmd.core.values.pace",
        "tmd.core.values.requests",
        "tmd.core.values.decode_errors",
        "tmd.core.values.shadows",
        "tmd.plugin",
        "tmd.replaced_file",
    }


def test_the_folders_are_never_imported_under_their_own_names():
    assert "detectors" not in sys.modules
    assert "policies" not in sys.modules


# --- third-party plug-ins -------------------------------------------------------------------------


def test_a_third_party_detector_observes_until_configured(settings):
    keen = point("keen")
    default = load_detectors(settings(), [keen])[0]
    told = load_detectors(settings(detectors={"keen": {"strategy": "act"}}), [keen])[0]

    assert default.strategy is Strategy.OBSERVE
    assert told.strategy is Strategy.ACT


def test_a_detector_gets_its_own_keys(settings):
    section = {"limit": 7}
    loaded = load_detectors(settings(detectors={"keen": section}), [point("keen")])[0]

    assert loaded.config == KeenConfig(limit=7)


def test_a_key_that_the_detector_does_not_take_is_an_error(settings):
    wrong = settings(detectors={"keen": {"limits": 7}})
    with pytest.raises(ConfigError, match=r"\[detectors.keen\].*limits; did you mean 'limit'"):
        load_detectors(wrong, [point("keen")])


def test_a_section_without_a_detector_is_an_error(settings):
    with pytest.raises(ConfigError, match=r"\[detectors.keem\]"):
        load_detectors(settings(detectors={"keem": {}}), [point("keen")])


def test_a_detector_can_be_switched_off(settings):
    assert load_detectors(settings(detectors={"keen": {"enabled": False}}), [point("keen")]) == []


def test_policies_come_in_the_configured_order(settings):
    points = [*installed(POLICY_GROUP), point("odd")]
    chosen = settings(policies={"enabled": ["odd", "replace_failed"]})

    assert [p.name for p in load_policies(chosen, points)] == ["odd", "replace_failed"]


def test_an_unknown_policy_is_an_error(settings):
    chosen = settings(policies={"enabled": ["odder"]})
    with pytest.raises(ConfigError, match=r"no policy 'odder'.*odd"):
        load_policies(chosen, [point("odd")])


def test_plug_ins_can_be_allowed_and_denied():
    points = [point("keen"), point("unfinished")]

    assert list(load(points, Detector, Plugins(allow=("keen",)))) == ["keen"]
    assert list(load(points, Detector, Plugins(deny=("unfinished",)))) == ["keen"]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (point("gone", "Nowhere"), "cannot be imported"),
        (EntryPoint("gone", "no_such_module:X", "g"), "cannot be imported"),
        (point("odd"), "not a subclass of tmd.plugin.Detector"),
        (point("other", "Keen"), "both names must be the same"),
        (point("unfinished"), "abstract"),
        (point("unconfigurable"), "DetectorConfig"),
        (point("exploding"), "no licence"),
    ],
    ids=lambda value: value.name if isinstance(value, EntryPoint) else "",
)
def test_a_broken_plug_in_is_named_with_its_origin(entry, complaint):
    with pytest.raises(PluginError) as raised:
        load([entry], Detector, Plugins())

    assert complaint in str(raised.value)
    assert f"'{entry.name}'" in str(raised.value)
    assert entry.value in str(raised.value)


def test_a_plug_in_that_ends_the_process_cannot_be_used(settings, tmp_path, monkeypatch):
    """With status 0 systemd would not start the daemon again; and a reload must go on."""
    (tmp_path / "main_at_import.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    imported = EntryPoint("imported", "main_at_import:X", "g")
    keys = settings(policies={"enabled": ["leaving"], "leaving": {}})

    for broken in (imported, point("ending")):
        with pytest.raises(PluginError, match=r"raised SystemExit\(0\)"):
            load([broken], Detector, Plugins())
    with pytest.raises(ConfigError, match=r"raised SystemExit\(0\)"):
        load_policies(keys, [point("leaving")])


def test_a_plug_in_whose_constructor_blocks_is_named(settings):
    """A daemon that is reloaded stands still meanwhile."""
    named = []
    points = [point("keen"), point("slow")]
    load_detectors(settings(), points, slow=lambda *found: named.append(found))

    assert [origin.name for origin, _ in named] == ["slow"]
    assert named[0][1] > BLOCKS_S


def test_a_duplicate_name_is_refused():
    with pytest.raises(PluginError, match="taken"):
        load([point("keen"), point("keen")], Detector, Plugins())


# --- policies' own keys ---------------------------------------------------------------------------


def test_a_policy_has_its_own_table(settings):
    chosen = settings(policies={"enabled": ["choosy", "odd"], "choosy": {"limit_s": 5}})
    choosy, odd = load_policies(chosen, [point("choosy"), point("odd")])

    assert choosy.config == ChoosyConfig(limit_s=5.0)
    assert odd.config == PolicyConfig()


@pytest.mark.parametrize(
    ("own", "word"),
    [
        ({"choosy": {"limit": 5}}, "unknown key limit; did you mean 'limit_s'"),
        ({"choosy": {"limit_s": math.nan}}, r"\[policies.choosy\] limit_s: not a number"),
        ({"choosy": {"limit_s": "much"}}, "policies.choosy"),
        ({"odd": {"any": 1}}, "own keys of this policy are: none"),
        ({"missing": {}}, "no such policy"),
    ],
    ids=["unknown key", "no number", "wrong value", "takes none", "not installed"],
)
def test_a_policys_table_is_checked_even_if_the_policy_is_not_enabled(settings, own, word):
    with pytest.raises(ConfigError, match=word):
        load_policies(settings(policies={"enabled": [], **own}), [point("choosy"), point("odd")])


def test_keys_that_a_policy_refuses_are_named(settings):
    """What its constructor raises is a mistake of the configuration."""
    chosen = settings(policies={"enabled": [], "strict": {"limit_s": 0.5}})

    with pytest.raises(ConfigError, match=r"\[policies\.strict\].*limit_s is too low"):
        load_policies(chosen, [point("strict")])


def test_a_policy_that_is_denied_is_not_said_to_be_missing(settings):
    chosen = settings(policies={"enabled": ["odd"]}, plugins={"deny": ["odd"]})
    with pytest.raises(ConfigError, match=r"'odd' is installed, but \[plugins\] allow or deny"):
        load_policies(chosen, [point("odd")])


def test_names_of_no_plug_in_are_found(settings):
    """A misspelt name under deny leaves the door open."""
    lines = strangers(settings(plugins={"allow": ["trainer"], "deny": ["replace_fialed"]}))

    assert [line.partition(";")[0] for line in lines] == [
        "[plugins] deny: no plug-in 'replace_fialed' is installed here"
    ]
    assert "did you mean 'replace_failed'" in lines[0]


def test_keys_may_have_other_names_than_the_fields(settings):
    (found,) = load_detectors(settings(detectors={"renamed": {"poll-s": 2}}), [point("renamed")])

    assert found.config == RenamedConfig(poll_s=2.0)
    with pytest.raises(ConfigError, match="did you mean 'poll-s'"):
        load_detectors(settings(detectors={"renamed": {"poll_s": 2}}), [point("renamed")])
