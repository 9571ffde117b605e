"""SIGHUP: applies the settings that may change at runtime and reports those that may not.

The settings of detectors, policies, plug-ins, 'tmd inject' and the log are reloaded; others need a
restart. An invalid configuration changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec import structs

from tmd.config import Settings
from tmd.core.values.errors import ConfigError, PluginError
from tmd.core.values.reasons import in_words
from tmd.daemon import logs
from tmd.daemon.bus import WakeEvent
from tmd.daemon.injections import Injections
from tmd.daemon.leader import Leader
from tmd.daemon.plugins import PluginOrigin, load_detectors, load_policies
from tmd.daemon.systemd import Notifier
from tmd.daemon.watcher import Watcher

log = structlog.get_logger("tmd.reload")

LIVE = frozenset({"detectors", "policies", "plugins", "inject", "log"})
"""Sections that are reloaded."""
KEPT = "configuration not reloaded, the old one stays in force"


def fixed(before: Settings, after: Settings) -> list[str]:
    """Changed keys that need a restart, as ``[section] key``."""
    found = []
    for section in Settings.__struct_fields__:
        if section in LIVE:
            continue
        old, new = getattr(before, section), getattr(after, section)
        keys = type(old).__struct_fields__
        found += [f"[{section}] {k}" for k in keys if getattr(old, k) != getattr(new, k)]
    return found


def taken_over(before: Settings, after: Settings) -> Settings:
    """The resulting settings: the reloadable sections of ``after``, the rest unchanged."""
    return structs.replace(before, **{section: getattr(after, section) for section in LIVE})


def _log_slow(origin: PluginOrigin, seconds: float) -> None:
    log.warning("plug-in blocks as it is loaded", plugin=origin.name, seconds=round(seconds, 1))


class Reloader:
    """One per daemon. SIGHUP rings ``asked``."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        watcher: Watcher,
        leader: Leader,
        injections: Injections,
        notifier: Notifier,
    ) -> None:
        self.asked = WakeEvent()
        self._settings = settings
        self._read = read
        self._watcher = watcher
        self._leader = leader
        self._injections = injections
        self._notifier = notifier

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            if await self.asked.wait(3600.0):
                self._notifier.reloading()
                result = await self.reload()
                self._notifier.ready(result)

    async def reload(self) -> str:
        """Read and apply the settings; return the result as a sentence."""
        try:
            after = self._read()
            ahead = taken_over(self._settings, after)
            detectors = load_detectors(ahead, slow=_log_slow)
            policies = load_policies(ahead, slow=_log_slow)
        except (ConfigError, PluginError) as error:
            log.error(KEPT, error=str(error))
            return "configuration not reloaded: it is invalid"
        except Exception as error:  # the old configuration is sound, whatever the new one did
            log.exception(KEPT, error=in_words(error))
            return "configuration not reloaded: reading it failed"
        needs_restart = fixed(self._settings, after)
        self._settings = ahead
        logs.configure(ahead.log, host=ahead.host.name)
        self._leader.adopt(policies)
        self._injections.adopt(ahead.inject.enabled)
        restarted = await self._watcher.adopt(detectors)
        if needs_restart:
            log.warning("some changes need a restart and were not applied", keys=needs_restart)
        log.info("configuration reloaded", detectors_restarted=restarted)
        return "configuration reloaded" + (", some changes need a restart" if needs_restart else "")
