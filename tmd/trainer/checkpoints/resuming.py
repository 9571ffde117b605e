"""Chooses the checkpoint to resume from, and restores it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmd.core.values.checkpoints import REFUSED, complete, name_of
from tmd.core.values.errors import ConfigError, StateMismatch
from tmd.core.values.reasons import in_words
from tmd.trainer.checkpoints.archive import ABSENT, CheckpointReader, flaw, new_run
from tmd.trainer.checkpoints.checkpoints import prune
from tmd.trainer.checkpoints.naming import PRIVATE, Names, Placing, bare, dotted, prefix_of
from tmd.trainer.checkpoints.naming import Path as Name
from tmd.trainer.checkpoints.placing import Claims, unclaimed
from tmd.trainer.checkpoints.staging import layout_of, private_path
from tmd.trainer.state.layout import Layout, dtype_of, specs, unflatten

UNUSABLE = "!"
"""Prefix of a rank's answer if it cannot use the folder."""
ANY_STEP = 1 << 62

log = logging.getLogger("tmd.trainer")

Gathered = Callable[[str], Sequence[str]]
"""Exchanges a string among all ranks; returns the strings by rank."""


class Chosen(NamedTuple):
    """Where a run begins."""

    step: int | None
    """That of the newest undamaged checkpoint; ``None`` if the folder has no checkpoint."""
    run: str
    """Id of this run."""


def chosen(folder: Path, rank: int, gathered: Gathered, *, resume: bool) -> Chosen:
    """The checkpoint to resume from, agreed among all ranks.

    Each rank reads its share of the files. A damaged checkpoint is renamed, and the previous one is
    checked.

    Raises:
        ConfigError: the folder cannot be used, has only damaged checkpoints, or is not the same
            for all ranks.
    """
    listed = gathered(_listed(folder, resume) if rank == 0 else "")[0]
    if listed.startswith(UNUSABLE):
        raise ConfigError(f"checkpoints: {listed.removeprefix(UNUSABLE)}")
    run, *words = listed.split(" ")
    steps = [int(word) for word in words]
    failure = ""
    for step in steps:
        answers = gathered(failure)
        if failure := answers[0]:
            raise ConfigError(f"checkpoints: {failure}")
        found = gathered(_flaw(folder, step, rank, len(answers)))
        if ABSENT in found:
            raise ConfigError(f"checkpoints: {folder} is not the same folder for all ranks")
        if barred := next((answer for answer in found if answer.startswith(UNUSABLE)), ""):
            raise ConfigError(f"checkpoints: {barred.removeprefix(UNUSABLE)}")
        if not any(found):
            return Chosen(step, run)
        why = "; ".join(dict.fromkeys(filter(None, found)))
        log.error("checkpoint %s is refused: %s", folder / name_of(step), why)
        failure = _put_aside(folder / name_of(step)) if rank == 0 else ""
    if steps:
        raise ConfigError(f"checkpoints: {failure or _only_damaged(folder)}")
    return Chosen(None, run)


def _flaw(folder: Path, step: int, rank: int, ranks: int) -> str:
    """Why a checkpoint is damaged, or why this rank cannot read it; empty if it is whole."""
    try:
        return flaw(folder, step, rank, ranks)
    except PermissionError as error:
        return f"{UNUSABLE}{in_words(error)}: let the user of this job read the folder"
    except OSError as error:
        where = folder / name_of(step)
        return (
            f"{UNUSABLE}{where} cannot be read now: {in_words(error)}: start the job again; if it "
            f"stays so, rename it to {where.name}{REFUSED} to use the one before"
        )


def _listed(folder: Path, resume: bool) -> str:
    """Rank 0: the id of the new run and the steps of complete checkpoints, newest first, or why the
    folder cannot be used.

    Removes incomplete checkpoints from a folder that can be used. The next checkpoint removes those
    beyond the number to keep.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(folder)
        steps = complete(names)
        if steps and not resume:
            return (
                f"{UNUSABLE}{folder} has checkpoints of an earlier run, up to step {steps[0]}: "
                "give another folder, or resume from them (resume=True)"
            )
        if resume and not steps and any(name.endswith(REFUSED) for name in names):
            return f"{UNUSABLE}{_only_damaged(folder)}"
        prune(folder, len(steps), partial_before=ANY_STEP)
        return " ".join([new_run(), *map(str, steps)])
    except OSError as error:
        return f"{UNUSABLE}{in_words(error)}"


def _only_damaged(folder: Path) -> str:
    return (
        f"all checkpoints in {folder} are damaged (their names end in {REFUSED}): give another "
        "folder to start from scratch, or remove them; one that can be read again is used once "
        "it has its former name"
    )


def _put_aside(place: Path) -> str:
    """Rename a damaged checkpoint. Returns why it cannot be renamed, or an empty string."""
    refused = place.with_name(place.name + REFUSED)
    try:
        if refused.exists():
            shutil.rmtree(refused)  # of an earlier run that came to the same step
        place.rename(refused)
    except OSError as error:
        return f"cannot rename the damaged {place}: {in_words(error)}"
    return ""


def check(
    reading: CheckpointReader,
    claims: Claims,
    place: Placing,
    size: int,
    awaited: Collection[Name] = (),
) -> None:
    """Check that some rank claims every entry of a checkpoint, except ``awaited`` ones: buffers
    that models make while they train. If the number of ranks is the same, an unclaimed tensor is
    only logged.

    Raises:
        StateMismatch: an entry is unclaimed, or its owner is ambiguous.
    """
    modules = {*_values(reading, 0)["modules"], *(name[0] for claim in claims for name in claim)}
    found = {name for name in unclaimed(reading.saved, claims, place) if bare(name) not in awaited}
    left = sorted(dotted(name) for name in found if bare(name)[0] in modules)
    if not left:
        return
    some = f"{', '.join(left[:3])}{' and more' if len(left) > 3 else ''}"
    if reading.seal.size != size or any(PRIVATE.match(name) for name in left):
        raise StateMismatch(
            f"{reading.path} has {some}, which no rank registers: resume with the model that "
            "wrote it"
        )
    log.warning("%s has %s, which no rank registers: ignored", reading.path, some)


def restore(
    reading: CheckpointReader, names: Names, place: Placing, rank: int, size: int, seed: int
) -> None:
    """Restore ``rank``. If the number of ranks or the names differ from those of the checkpoint,
    tensors are looked up by name, and all other values are taken from rank 0.

    Raises:
        StateMismatch: the checkpoint is of another model, or cannot be divided differently.
    """
    values_of = cache(partial(_values, reading))
    same = _wrote_alike(reading, values_of, names, rank, size)
    own = values_of(rank) if same else {}
    first = own if same else values_of(0)
    like_first = same or (names.home(rank) == 0 and first["names"] == names.digest)
    _check_order(reading.path, names, first.get("others"), first.get("groups"))
    targets = {} if like_first else names.buffers(rank, place)
    kept = []
    for number in range(len(names.units)):
        param = names.place(number, rank, place)
        written = own if same else values_of(reading.writer(param))
        found, values = _optimizer_state(reading, names, number, param, written["kept"])
        found[param] = names.units.params[number]
        if found.keys() & targets.keys():
            reading.into(found)  # was tied to another tensor
        else:
            targets.update(found)
        kept.append(values)
    reading.into(targets)
    for number, values in enumerate(kept):
        names.units.keep(number, values)
    rest = _private(reading, rank if same else 0, "rest")
    try:
        names.units.place_rest(*rest, buffers=like_first)
    except (LookupError, ValueError) as error:
        raise StateMismatch(
            f"{reading.path} was written by a job with a different model"
        ) from error
    if same and "graded" in own:  # not in those of 0.1.0
        names.units.grade(own["graded"])
    if same and own["seed"] != seed:
        log.warning(
            "random numbers differ from those of the previous run, which had seed %d, not %d: call "
            "torch.manual_seed with that seed before register to continue them",
            *(own["seed"], seed),
        )


def _check_order(
    path: Path, names: Names, others: list[str] | None, groups: list[str] | None
) -> None:
    """Raises StateMismatch: what is found by its place is registered in another order. A checkpoint
    of tmd 0.1.0 has neither ``others`` nor ``groups``."""
    if others not in (None, names.others):
        raise StateMismatch(
            f"besides models and optimizers {path} has {_enumerated(others or ())}, and this "
            f"script registers {_enumerated(names.others)}: give register() and session.counter() "
            "the same names in the same order"
        )
    ours = names.param_groups
    if groups not in (None, ours) and sorted(groups or ()) == sorted(ours):
        raise StateMismatch(
            f"{path} has the optimizers, or their parameter groups, in another order: give "
            "register() the same optimizers, and these the same groups, in the same order"
        )


def _enumerated(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _optimizer_state(
    reading: CheckpointReader, names: Names, number: int, param: Name, written: dict[str, Any]
) -> tuple[dict[Name, Tensor], dict[str, Any]]:
    """Tensors that receive the optimizer state of a unit, and the complete state, which contains
    them."""
    name, units = names.names(number)[0], names.units
    if name not in written:
        return {}, {}
    at, keys, rest = (written[name][what] for what in ("at", "keys", "values"))
    state = (*prefix_of(param), *at)
    found = {}
    for key in reading.saved.below(state):
        described = reading.described((*state, key))
        found[*state, key] = units.blank(
            units.params[number], described.size, described.properties.dtype
        )
    values = {path[-1]: value for path, value in found.items()} | rest
    if missing := [key for key in keys if key not in values]:
        raise StateMismatch(f"{reading.path} lacks {', '.join(missing)} of {name}")
    return found, values


def _wrote_alike(
    reading: CheckpointReader,
    values_of: Callable[[int], dict[str, Any]],
    names: Names,
    rank: int,
    size: int,
) -> bool:
    """Whether ``rank`` of ``size`` wrote a state with these ``names``, and so gets just that."""
    same: bool = reading.seal.size == size and values_of(rank).get("names") == names.digest
    return same


def buffers_of(
    reading: CheckpointReader, names: Names, rank: int, size: int
) -> dict[str, Tensor] | None:
    """The buffers that :func:`restore` gives ``rank``, by name, in host memory; ``None`` if they
    are not its own."""
    if not _wrote_alike(reading, partial(_values, reading), names, rank, size):
        return None
    layout, tensors = _private(reading, rank, "rest")
    buffers: dict[str, Tensor] = unflatten(layout, iter(tensors))["buffers"]
    return buffers


def _values(reading: CheckpointReader, rank: int) -> dict[str, Any]:
    """Values other than tensors that a rank has written."""
    layout, tensors = _private(reading, rank, "more")
    written: dict[str, Any] = unflatten(layout, iter(tensors))
    return written


def _private(reading: CheckpointReader, rank: int, name: str) -> tuple[Layout, list[Tensor]]:
    place = private_path(rank, name)
    size = reading.described((*place, "0")).size
    first = torch.zeros(size, dtype=torch.uint8, device="cpu")
    reading.into({(*place, "0"): first})
    layout = layout_of(first)
    tensors = [torch.zeros(s.shape, dtype=dtype_of(s), device="cpu") for s in specs(layout)]
    reading.into({(*place, str(n + 1)): tensor for n, tensor in enumerate(tensors)})
    return layout, tensors


def opened(folder: Path, step: int) -> CheckpointReader:
    """The chosen checkpoint, of ``step``. Raises StateMismatch."""
    try:
        return CheckpointReader(folder, step)
    except OSError as error:
        raise StateMismatch(
            f"{folder / name_of(step)} cannot be read: {in_words(error)}"
        ) from error
