"""The digest of a tensor that a device holds, computed there: few bytes come to host memory.

It is a multilinear hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): the
sum of all 32-bit words, each times a number that belongs to its place, modulo 2**64. Sums of
integers do not depend on their order, so that every device gives the same bits.
"""

from __future__ import annotations

from functools import cache

import numpy
import torch
from torch import Tensor

WORDS = 1 << 20
"""Words in a piece. Each needs some 40 bytes of the device's memory meanwhile, and 16 for good."""
SUMS = 2
"""Independent sums: one misses the changes of two words with a chance of 2**-33 at most."""
SEED = 20_241_214


def device_digest(tensor: Tensor) -> bytes:
    """Size and sums of ``tensor``, of any shape and dtype; waits for its device."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 4 * 4
    words = flat[:whole]
    if words.storage_offset() % 4:
        words = words.clone()
    factors = _factors(flat.device)
    found = torch.zeros(SUMS, dtype=torch.int64, device=flat.device)
    for piece in (*torch.split(words.view(torch.int32), WORDS), flat[whole:]):
        products = piece.to(torch.int64) * factors[:, 1 : 1 + piece.numel()]
        # What came before is multiplied, too: the place of a piece counts.
        found = found * factors[:, 0] + products.sum(dim=1)
    return flat.numel().to_bytes(8, "little") + found.cpu().numpy().tobytes()


@cache
def _factors(place: torch.device) -> Tensor:
    """Shape (SUMS, 1 + WORDS), int64: the factor of earlier pieces, then one for each word.

    They are odd, so that a change of one word is always found. All workers have the same ones.
    """
    # numpy promises that this stream never changes.
    drawn = numpy.random.PCG64(SEED).random_raw(SUMS * (1 + WORDS)) | numpy.uint64(1)
    factors = torch.from_numpy(drawn.view(numpy.int64)).view(SUMS, 1 + WORDS)
    # From pageable memory: the copy has ended here, and any stream may read it.
    return factors.to(place)
