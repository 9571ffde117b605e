"""What each event costs a job, with the source of each figure."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words, os_reason

DATA = "costs.toml"


class Costs(Struct, frozen=True):
    """Seconds of the whole job, unless a field says otherwise."""

    step_s: float
    """One step."""
    restart_s: float
    """All workers end, start again and load a checkpoint; without work that is repeated."""
    save_s: float
    """How long training waits for a checkpoint."""
    warm_s: float
    """A loss that a warm standby takes over, beyond the step that is repeated."""
    hot_s: float
    """A loss that the hot standby of the lost rank takes over: the step goes on."""
    move_s: float
    """The pause of a planned move."""
    prepare_s: float
    """Time from a request to the switch of a planned move, in which the job trains; also until a
    hot standby follows its rank."""
    resize_s: float
    """An elastic job loses or takes in a replica."""
    snapshot_s: float
    """How long training waits for a snapshot."""
    hot_share: float
    """Slow-down of the job for one hot standby, as a share of a step."""
    rejoin_s: float
    """Time until a worker that ended alone is started again and stands by."""


class Sourced(Struct, frozen=True):
    """Costs, and the source of each by its name."""

    costs: Costs
    sources: dict[str, str]


def shipped() -> dict[str, Sourced]:
    """The sets of costs that come with tmd, by name."""
    text = resources.files("tmd.simulate").joinpath(DATA).read_text()
    return {name: _sourced(rows, name) for name, rows in tomllib.loads(text).items()}


def read(path: Path) -> Sourced:
    """The costs in a user's file; ``bench`` supplies those that it omits.

    Raises:
        ConfigError: names the file, the key and the remedy.
    """
    try:
        rows = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = os_reason(error) if isinstance(error, OSError) else in_words(error)
        raise ConfigError(f"cannot read {path}: {why}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {in_words(error)}") from None
    return changed(shipped()["bench"], rows, str(path))


def changed(base: Sourced, values: dict[str, Any], source: str) -> Sourced:
    """``base`` with other ``values``, all from ``source``.

    Raises:
        ConfigError: a key is unknown, or a value is not a number of at least 0.
    """
    known = Costs.__struct_fields__
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{source}: there is no cost '{key}'; there are {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            raise ConfigError(f"{source}: {key} = {value!r}: give a number of at least 0")
        if key == "step_s" and value == 0:
            raise ConfigError(f"{source}: step_s = 0: give a number above 0")
    costs = structs.replace(base.costs, **{k: float(v) for k, v in values.items()})
    return Sourced(costs, {**base.sources, **dict.fromkeys(values, source)})


def _sourced(rows: dict[str, Any], name: str) -> Sourced:
    values = {key: row["value"] for key, row in rows.items()}
    sources = {key: f"{name}: {row['source']}" for key, row in rows.items()}
    return Sourced(msgspec.convert(values, Costs), sources)
