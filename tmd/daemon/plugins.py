"""Finding and checking plug-ins. A broken plug-in stops the daemon at start, never later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from tmd.config import Plugins, Settings
from tmd.core.alerts.findings import AT_ONCE, Rules
from tmd.core.values.errors import ConfigError, PluginError
from tmd.core.values.reasons import in_words
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
    """Where a plug-in comes from."""

    name: str
    target: str
    distribution: str

    def __str__(self) -> str:
        return f"plug-in '{self.name}' ({self.target}, from {self.distribution})"


class LoadedDetector(Struct, frozen=True):
    """A detector ready to be started."""

    detector: Detector
    config: DetectorConfig
    strategy: Strategy
    origin: PluginOrigin
    state_dir: Path
    """Its own folder; made when it is started."""
    rules: Rules = AT_ONCE
    """When its findings count, and what becomes of one that comes back."""

    def why_not(self) -> str | None:
        """Why it cannot work on this host as it is configured, or ``None`` if it can."""
        return self.detector.supported_with(self.config)

    def sources(self) -> str:
        """What it goes by on this host, for people."""
        return self.detector.sources_with(self.config)


def installed(group: str) -> list[EntryPoint]:
    """Entry points of ``group`` in order of their names."""
    return sorted(entry_points(group=group), key=lambda e: e.name)


def load(
    points: Iterable[EntryPoint], base: type, rules: Plugins
) -> dict[str, tuple[Any, PluginOrigin]]:
    """Instances by name of all plug-ins in ``points`` that ``rules`` admit.

    Raises:
        PluginError: one cannot be imported, is no ``base``, or has a name that is taken.
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
        found[point.name] = (_instance(point, base, origin), origin)
    return found


def load_detectors(
    settings: Settings, points: Sequence[EntryPoint] | None = None
) -> list[LoadedDetector]:
    """All enabled detectors with their configuration.

    Raises:
        PluginError: see :func:`load`.
        ConfigError: ``[detectors.<name>]`` has a key or value that the detector does not take.
    """
    points = installed(DETECTOR_GROUP) if points is None else points
    found = load(points, Detector, settings.plugins)
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


def load_policies(settings: Settings, points: Sequence[EntryPoint] | None = None) -> list[Policy]:
    """The enabled policies in the configured order.

    Raises:
        PluginError: see :func:`load`.
        ConfigError: an enabled or configured policy is not installed, or one does not take a key or
            value of its ``[policies.<name>]``.
    """
    points = installed(POLICY_GROUP) if points is None else points
    found = load(points, Policy, settings.plugins)
    for name in settings.policies.own:
        if name not in {p.name for p in points}:
            raise ConfigError(
                f"[policies.{name}]: no such policy is installed; 'tmd plugins' lists them"
            )
    for name in settings.policies.enabled:
        if name not in found:
            raise ConfigError(
                f"[policies] enabled: there is no policy '{name}'; "
                f"installed and allowed are {', '.join(found) or 'none'}"
            )
    # Also those that are not enabled: a wrong key is told before the day it is needed.
    ready = {name: _ready(policy, settings) for name, (policy, _) in found.items()}
    return [ready[name] for name in settings.policies.enabled]


def _ready(policy: Policy, settings: Settings) -> Policy:
    own = settings.policies.own.get(policy.name)
    if own is None:
        return policy
    config = _converted(own, policy.Config, f"policies.{policy.name}", "policy")
    return type(policy)(config)


def configured(detector: Detector, origin: PluginOrigin, settings: Settings) -> LoadedDetector:
    """``detector`` with its section of ``settings``.

    Raises:
        ConfigError: the section has a key or value that the detector does not take.
    """
    section = settings.detector(origin.name)
    config = _converted(section.own, detector.Config, f"detectors.{origin.name}", "detector")
    folder = settings.host.state_dir / "detectors" / origin.name
    rules = settings.triage.rules(section)
    return LoadedDetector(detector, config, section.strategy, origin, folder, rules)


def _converted(own: dict[str, Any], kind: type[T], section: str, what: str) -> T:
    try:
        return msgspec.convert(own, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(getattr(kind, "__struct_fields__", ())) or "none"
        raise ConfigError(
            f"[{section}]: {in_words(error)}; own keys of this {what} are: {known}"
        ) from None


def _instance(point: EntryPoint, base: type, origin: PluginOrigin) -> Any:
    try:
        cls = point.load()
    except Exception as error:  # whatever a foreign module raises while it is imported
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
        return cls()
    except Exception as error:  # abstract methods missing, or its own constructor failed
        raise PluginError(f"{origin} cannot be created: {in_words(error)}") from error


def describe(point: EntryPoint) -> PluginOrigin:
    """Where the plug-in of ``point`` comes from."""
    dist = point.dist
    name = f"{dist.name} {dist.version}" if dist is not None else "no distribution"
    return PluginOrigin(name=point.name, target=point.value, distribution=name)
