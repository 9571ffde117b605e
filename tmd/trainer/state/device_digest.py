"""The digest of a tensor that a device holds, computed there: 16 bytes of it come to host memory.

It is a multilinear hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) of
pieces of 32-bit words: the sum modulo 2**64 of all words of a piece, each times a number that
belongs to its place. A piece is added to a fixed multiple of what came before it. Sums of integers
do not depend on their order, so that every device gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from tmd.fabric import device
from tmd.fabric.packing import flat_bytes

WORDS = 1 << 18
"""Words in a piece. Each needs some 40 bytes of the device's memory meanwhile, and 16 for good."""
SUMS = 2
"""Independent sums. Each misses a change of two words with a chance of 2**-32 at most."""
SEED = 20_241_214


def digest_from(tensor: Tensor, sums: Any) -> bytes:
    """Size and sums of ``tensor``, of any shape and dtype; its sums are in host memory."""
    return tensor.nbytes.to_bytes(8, "little") + bytes(sums)


def sums_of(tensor: Tensor) -> Tensor:
    """The sums of ``tensor``: int64 [SUMS], on its device, which may not have computed them yet.

    If the device lacks memory for it, they are computed from a copy in host memory.
    """
    try:
        return _sums(flat_bytes(tensor))
    except torch.OutOfMemoryError:
        return _sums(flat_bytes(device.current().on_host(tensor)))


def _sums(flat: Tensor) -> Tensor:
    whole = flat.numel() // 4 * 4
    words = flat[:whole]
    if words.storage_offset() % 4:
        words = words.clone()
    pieces = list(torch.split(words.view(torch.int32), WORDS))
    if whole < flat.numel():
        pieces.append(flat[whole:])
    factors = _factors(flat.device)
    found = torch.zeros(SUMS, dtype=torch.int64, device=flat.device)
    for piece in pieces:
        products = piece.to(torch.int64) * factors[:, 1 : 1 + piece.numel()]
        found = found * factors[:, 0] + products.sum(dim=1)
    return found


@cache
def _factors(place: torch.device) -> Tensor:
    """Shape (SUMS, 1 + WORDS), int64: the factor of earlier pieces, then one for each word.

    All workers have the same ones. They are odd, so that a change of one word is always found. That
    of earlier pieces is 5 modulo 8: only its power 2**31 is 1 modulo 2**33. So signs that flip at
    the same place of two pieces do not cancel out.
    """
    # numpy promises that this stream never changes.
    drawn = numpy.random.PCG64(SEED).random_raw(SUMS * (1 + WORDS)).reshape(SUMS, 1 + WORDS)
    drawn |= numpy.uint64(1)
    drawn[:, 0] = drawn[:, 0] & ~numpy.uint64(7) | numpy.uint64(5)
    # From pageable memory: the copy has ended here, and any stream may read it.
    return torch.from_numpy(drawn.view(numpy.int64)).to(place)
