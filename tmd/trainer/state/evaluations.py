"""Gives the loader of an evaluation the rank held now, and an order that all ranks share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from tmd.trainer.state.loading import epoch_of, seed_own_generators
from tmd.trainer.state.placing import DataPlace, Loader, fixed_rank, is_function, pieces, placed

log = logging.getLogger("tmd.trainer")


class _Look(NamedTuple):
    """What a part of a loader kept, when an evaluation in ``place`` was about to begin."""

    place: DataPlace
    kept: int | None
    moved: bool
    """Whether the evaluation before was in another place."""


class Evaluations:
    """Places the loaders of evaluations.

    It finds streams that keep the rank with which they were first iterated. Others keep a rank,
    too, until they are iterated again, so that only a look after a move tells.

    Args:
        warn: called with ``rank_kept``, in words, if an evaluation has used the data of another
            rank.
    """

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._looks: weakref.WeakKeyDictionary[object, _Look] = weakref.WeakKeyDictionary()

    def placed(self, loader: Loader, place: DataPlace, step: int) -> Iterable[Any]:
        """:func:`placed` for an evaluation in ``step`` that is about to begin, and in an order that
        follows from ``step``: a repeat or a joiner has iterated the loader more or less often."""
        if place.parts > 1 and not is_function(loader):
            looks = [self._outdated(each, place) for each in pieces(loader)]
            if why := next(filter(None, looks), ""):
                log.warning(why)
                self._warn(rank_kept=why)
        found: Any = placed(loader, place)
        if epoch_of(found) is not None:
            found.set_epoch(step)
        seed_own_generators(found, step)
        return cast("Iterable[Any]", found)

    def _outdated(self, piece: object, place: DataPlace) -> str:
        kept = fixed_rank(piece, place.parts)
        try:
            last = self._looks.get(piece)
            self._looks[piece] = _Look(place, kept, last is not None and last.place != place)
        except TypeError:  # not each object can be referred to
            return ""
        if last is None or not last.moved or kept is None or kept != last.kept:
            return ""
        return (
            f"the {type(piece).__name__} of an evaluation kept rank {kept} although the worker's "
            "rank has changed: the last evaluation used the data of another rank. Read the rank in "
            "__iter__ each time, and keep it in a local variable"
        )
