"""An epoch of a framework's loader is to a session what the loader itself would be."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from tmd.integrations.epoch import Epoch
from tmd.trainer.state.data import Feed
from tmd.trainer.state.placing import DataPlace

DATA: Any = list(range(32))


def shuffled() -> DataLoader[int]:
    return DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def init(number: int, rank: int) -> None:
    """Stands for a function of a framework."""


def drawn(loader: Any, call: int, part: int = 0) -> list[list[int]]:
    feed = Feed(loader, call, lambda: 1, lambda: DataPlace(part, 2))
    return [feed.next(step).tolist() for step in range(8)]


def epoch_of(loader: DataLoader[int]) -> Epoch:
    return Epoch(loader, begin=lambda: None, ends=lambda number: False)


def test_it_has_the_order_of_its_loader() -> None:
    loader, plain = shuffled(), shuffled()
    orders = [drawn(epoch_of(loader), call) for call in range(2)]

    assert orders == [drawn(plain, call) for call in range(2)]
    assert orders[0] != orders[1] == drawn(epoch_of(shuffled()), 1)


def test_its_loader_gets_the_rank_held_now() -> None:
    loader = shuffled()
    loader.worker_init_fn = partial(init, rank=0)
    drawn(epoch_of(loader), 0, part=1)

    assert isinstance(loader.worker_init_fn, partial)
    assert loader.worker_init_fn.keywords == {"rank": 1}
