"""The state machines as tables and pictures, from the tables in the code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from string import ascii_lowercase
from typing import TypeVar, get_args

from docs.generate.svg import State, machine
from tmd.core.planning import migration
from tmd.core.planning.directives import Directive
from tmd.core.values.model import Activity, Phase
from tmd.core.worker import responses, transitions
from tmd.fabric.generations import states
from tmd.fabric.generations.states import GenerationState
from tmd.fabric.unfinished_step import TABLE as UNFINISHED
from tmd.fabric.unfinished_step import StepState

StateName = TypeVar("StateName", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Table = Mapping[StateName, Mapping[Event, StateName]]

PHASES = {
    Phase.PREPARE: (100, 90),
    Phase.READY: (330, 90),
    Phase.SWITCH: (560, 90),
    Phase.DISARM: (445, 220),
    Phase.DONE: (790, 280),
    Phase.ABORTED: (215, 330),
    Phase.RECOVER: (100, 470),
    Phase.SYNC: (330, 470),
    Phase.RESUME: (560, 470),
}
ACTIVITIES = {
    Activity.STARTING: (90, 420),
    Activity.STANDBY: (340, 310),
    Activity.SHADOWING: (340, 90),
    Activity.IN_STEP: (620, 90),
    Activity.PREPARED: (620, 210),
    Activity.REFUSED: (90, 200),
    Activity.TRAINING: (880, 260),
    Activity.LEFT: (880, 440),
    Activity.STUCK: (620, 520),
    Activity.SYNCED: (340, 520),
}


GENERATIONS = {
    GenerationState.BUILDING: (100, 100),
    GenerationState.READY: (360, 100),
    GenerationState.LIVE: (620, 100),
    GenerationState.DISCARDED: (230, 280),
    GenerationState.RETIRED: (500, 280),
    GenerationState.ABORTED: (760, 280),
    GenerationState.FREED: (500, 440),
}


STEPS = {
    StepState.CLOSED: (100, 100),
    StepState.OPEN: (420, 100),
    StepState.SUSPENDED: (740, 100),
    StepState.VOID: (420, 280),
    StepState.FAILED: (100, 280),
}


def letters(table: Table[StateName, Event]) -> dict[Event, str]:
    """Event -> the letter by which the picture names it."""
    events = dict.fromkeys(event for row in table.values() for event in row)
    return dict(zip(events, ascii_lowercase, strict=False))


def transition_table(table: Table[StateName, Event], state: str) -> str:
    """One row for each cell of the table."""
    names = letters(table)
    rows = [
        f"| {before} | {names[event]}: {event} | {after} |"
        for before, row in table.items()
        for event, after in row.items()
    ]
    return "\n".join([f"| {state} | event | next |", "|---|---|---|", *rows])


def _picture(
    title: str,
    table: Table[StateName, Event],
    places: Mapping[StateName, tuple[int, int]],
) -> str:
    names = letters(table)
    edges: dict[tuple[str, str], list[str]] = {}
    for before, row in table.items():
        for event, after in row.items():
            edges.setdefault((before.value, after.value), []).append(names[event])
    states = [State(state.value, *place) for state, place in places.items()]
    return machine(title, states, {pair: " ".join(found) for pair, found in edges.items()})


def plan_table() -> str:
    return transition_table(migration.TABLE, "phase")


def plan_picture() -> str:
    return _picture("The phases of a plan", migration.TABLE, PHASES)


def worker_table() -> str:
    return transition_table(transitions.TABLE, "activity")


def worker_picture() -> str:
    return _picture("The activities of a worker", transitions.TABLE, ACTIVITIES)


def generation_table() -> str:
    return transition_table(states.TABLE, "state")


def generation_picture() -> str:
    return _picture("The states of a generation", states.TABLE, GENERATIONS)


def step_table() -> str:
    return transition_table(UNFINISHED, "state")


def step_picture() -> str:
    return _picture("The states of an unfinished step", UNFINISHED, STEPS)


def response_table() -> str:
    """What a worker does about a directive, by its activity."""
    lines = ["| activity | directive | response |", "|---|---|---|"]
    for activity, row in responses.TABLE.items():
        grouped: dict[responses.Response, list[str]] = {}
        for directive, response in row.items():
            grouped.setdefault(response, []).append(f"`{directive.__name__}`")
        for response, names in grouped.items():
            shown = "any" if len(names) == len(get_args(Directive)) else ", ".join(names)
            lines.append(f"| {activity} | {shown} | {response} |")
    return "\n".join(lines)
