"""Finds and checks plug-ins. A broken plug-in stops the daemon at start, never later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from tmd.config import Plugins, Settings, nearest
from tmd.core.alerts.findings import AT_ONCE, FindingRules
from tmd.core.values.errors import ConfigError, PluginError
from tmd.core.values.reasons import in_words
from tmd.daemon.foreign_code import contained_exit, timed_code
from tmd.plugin import (
    DETECTOR_GROUP,
    POLICY_GROUP,
    Detector,
    DetectorConfig,
    Policy,
    PolicyConfig,
    Strategy,
)

T = TypeVar("T")


class PluginOrigin(Struct, frozen=True):
    """Origin of a plug-in."""

    name: str
    target: str
    distribution: str

    def __str__(self) -> str:
        return f"plug-in '{self.name}' ({self.target}, from {self.distribution})"


OnSlow = Callable[[PluginOrigin, float], None]
"""Gets a plug-in whose import and construction have taken so many seconds that a daemon notices."""


def _never_mind(origin: PluginOrigin, seconds: float) -> None:
    """Nothing else waits for the plug-in."""


class LoadedDetector(Struct, frozen=True):
    """A detector ready to start."""

    detector: Detector
    config: DetectorConfig
    strategy: Strategy
    origin: PluginOrigin
    state_dir: Path
    """The detector's own folder, created when it starts."""
    rules: FindingRules = AT_ONCE
    """When its findings count, and how recurring ones are treated."""

    def why_not(self) -> str | None:
        """Why it cannot run on this host with its configuration, or ``None`` if it can.

        Raises:
            PluginError: it does not say so.
        """
        reason: object = self._ask(self.detector.supported_with)
        if reason is None or isinstance(reason, str):
            return reason
        raise PluginError(
            f"{self.origin}: supported_with() gives {reason!r}, neither a reason nor None"
        )

    def sources(self) -> str:
        """The sources it uses on this host, for people.

        Raises:
            PluginError: it does not say so.
        """
        return str(self._ask(self.detector.sources_with))

    def _ask(self, method: Callable[[DetectorConfig], object]) -> object:
        try:
            with contained_exit():
                return method(self.config)
        except Exception as error:  # foreign code may raise anything
            why = f"{method.__name__}() fails: {in_words(error)}"
            raise PluginError(f"{self.origin}: {why}") from error


def installed(group: str) -> list[EntryPoint]:
    """Entry points of ``group``, sorted by name."""
    return sorted(entry_points(group=group), key=lambda e: e.name)


def load(
    points: Iterable[EntryPoint], base: type, rules: Plugins, slow: OnSlow = _never_mind
) -> dict[str, tuple[Any, PluginOrigin]]:
    """Instances by name of all plug-ins in ``points`` that ``rules`` allow.

    Raises:
        PluginError: one cannot be imported, does not derive from ``base``, or has a duplicate name.
    """
    found: dict[str, tuple[Any, PluginOrigin]] = {}
    for point in points:
        origin = describe(point)
        if (rules.allow and point.name not in rules.allow) or point.name in rules.deny:
            continue
        if point.name in found:
            raise PluginError(
                f"{origin}: the name is taken by {found[point.name][1]}; "
                "uninstall one of them or list it under [plugins] deny"
            )
        with timed_code(partial(slow, origin)):
            found[point.name] = (_instance(point, base, origin), origin)
    return found


def load_detectors(
    settings: Settings, points: Sequence[EntryPoint] | None = None, slow: OnSlow = _never_mind
) -> list[LoadedDetector]:
    """All enabled detectors with their configuration.

    Raises:
        PluginError: see :func:`load`.
        ConfigError: ``[detectors.<name>]`` has a key or value that the detector does not accept.
    """
    points = installed(DETECTOR_GROUP) if points is None else points
    found = load(points, Detector, settings.plugins, slow)
    for name in settings.detectors:
        if name not in {p.name for p in points}:
            raise ConfigError(
                f"[detectors.{name}]: no such detector is installed; 'tmd plugins' lists them"
            )
    return [
        configured(detector, origin, settings)
        for name, (detector, origin) in found.items()
        if settings.detector(name).enabled
    ]


def load_policies(
    settings: Settings, points: Sequence[EntryPoint] | None = None, slow: OnSlow = _never_mind
) -> list[Policy]:
    """The enabled policies in configured order.

    Raises:
        PluginError: see :func:`load`.
        ConfigError: an enabled or configured policy is not installed, or does not accept a key or
            value of its ``[policies.<name>]``.
    """
    points = installed(POLICY_GROUP) if points is None else points
    found = load(points, Policy, settings.plugins, slow)
    known = {p.name for p in points}
    for name in settings.policies.own:
        if name not in known:
            raise ConfigError(
                f"[policies.{name}]: no such policy is installed; 'tmd plugins' lists them"
            )
    for name in settings.policies.enabled:
        if name in known - found.keys():
            raise ConfigError(
                f"[policies] enabled: '{name}' is installed, but [plugins] allow or deny excludes "
                "it"
            )
        if name not in found:
            raise ConfigError(
                f"[policies] enabled: there is no policy '{name}'; "
                f"installed and allowed are {', '.join(found) or 'none'}"
            )
    # Disabled ones, too: a wrong key is reported before the policy is needed.
    ready = {name: _ready(policy, settings) for name, (policy, _) in found.items()}
    return [ready[name] for name in settings.policies.enabled]


def _ready(policy: Policy, settings: Settings) -> Policy:
    own = settings.policies.own.get(policy.name)
    if own is None:
        return policy
    config = _converted(own, policy.Config, f"policies.{policy.name}", "policy")
    try:
        with contained_exit():
            return type(policy)(config)
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"[policies.{policy.name}]: the policy refuses these keys: {in_words(error)}"
        ) from error


def configured(detector: Detector, origin: PluginOrigin, settings: Settings) -> LoadedDetector:
    """``detector`` with its section of ``settings``.

    Raises:
        ConfigError: the section has a key or value that the detector does not accept.
    """
    section = settings.detector(origin.name)
    config = _converted(section.own, detector.Config, f"detectors.{origin.name}", "detector")
    folder = settings.host.state_dir / "detectors" / origin.name
    rules = settings.triage.rules(section)
    return LoadedDetector(detector, config, section.strategy, origin, folder, rules)


def _converted(own: dict[str, Any], kind: type[T], section: str, what: str) -> T:
    known = getattr(kind, "__struct_encode_fields__", ())
    listed = f"own keys of this {what} are: {', '.join(known) or 'none'}"
    for key in own.keys() - set(known):
        raise ConfigError(f"[{section}]: unknown key {key}{nearest(key, known) or f'; {listed}'}")
    for key, value in own.items():
        if value != value:  # NaN compares false with every limit
            raise ConfigError(f"[{section}] {key}: not a number; {listed}")
    try:
        with contained_exit():  # a Config may have code of its own
            return msgspec.convert(own, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}]: {in_words(error)}; {listed}") from None


def strangers(settings: Settings) -> list[str]:
    """Sentences about names under ``[plugins]`` of which nothing is installed."""
    known = {p.name for group in (DETECTOR_GROUP, POLICY_GROUP) for p in installed(group)}
    rules = settings.plugins
    return [
        f"[plugins] {key}: no plug-in '{name}' is installed here{nearest(name, known)}; names are "
        "those that 'tmd plugins' lists, not those of packages"
        for key, names in (("allow", rules.allow), ("deny", rules.deny))
        for name in names
        if name not in known
    ]


def _instance(point: EntryPoint, base: type, origin: PluginOrigin) -> Any:
    try:
        with contained_exit():
            cls = point.load()
    except Exception as error:  # importing foreign code may raise anything
        raise PluginError(f"{origin} cannot be imported: {error!r}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise PluginError(f"{origin} is not a subclass of tmd.plugin.{base.__name__}")
    if getattr(cls, "name", None) != point.name:
        raise PluginError(
            f"{origin}: its class is named '{getattr(cls, 'name', None)}'; "
            "both names must be the same"
        )
    expected = DetectorConfig if base is Detector else PolicyConfig
    config = getattr(cls, "Config", expected)
    if not (isinstance(config, type) and issubclass(config, expected)):
        raise PluginError(f"{origin}: Config must derive from tmd.plugin.{expected.__name__}")
    try:
        with contained_exit():
            return cls()
    except Exception as error:  # abstract methods are missing, or the constructor failed
        raise PluginError(f"{origin} cannot be created: {in_words(error)}") from error


def describe(point: EntryPoint) -> PluginOrigin:
    """The origin of the plug-in behind ``point``."""
    dist = point.dist
    name = f"{dist.name} {dist.version}" if dist is not None else "no distribution"
    return PluginOrigin(name=point.name, target=point.value, distribution=name)
