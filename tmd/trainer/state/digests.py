"""Digests of tensors and the bytes that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash
from torch import Tensor

from tmd.fabric import device
from tmd.trainer.state.device_digest import device_digest
from tmd.trainer.state.dtensors import flat_bytes, part

Digest = dict[str, str]
"""Hexadecimal digests (xxh3-128) by part of the state. See :func:`covered`."""
PACK_BELOW = 1 << 16
"""Bytes. Smaller tensors travel packed into one buffer, for fewer system calls. A device computes
no digest of them."""


def digest_of(tensors: Iterable[Tensor]) -> str:
    """The digest (hex, xxh3-128) that a transfer of ``tensors`` would have."""
    digest = xxhash.xxh3_128()
    for chunk in chunks(list(tensors)):
        digest.update(chunk)
    return digest.hexdigest()


def chunks(tensors: list[Tensor]) -> Iterator[memoryview]:
    for group in groups(tensors):
        if len(group) == 1:
            yield raw(group[0].contiguous())
        else:
            yield memoryview(b"".join(raw(t.contiguous()) for t in group))


def groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in groups of consecutive small ones. Both sides form the same groups."""
    run: list[Tensor] = []
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size < PACK_BELOW:
            run.append(tensor)
            continue
        if run:
            yield run
            run = []
        yield [tensor]
    if run:
        yield run


def covered(tensor: Tensor, *, on_device: bool) -> bytes | memoryview:
    """What of ``tensor`` enters the digest of a state: its bytes, or a digest of them.

    ``on_device``: whether a device holds the parameter that it belongs to. If so, the digest of a
    large tensor enters, wherever a worker keeps the tensor itself.
    """
    own = part(tensor)
    return device_digest(own) if on_device and own.nbytes >= PACK_BELOW else raw(own)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of the part of ``tensor`` that this rank holds, in host memory."""
    flat = flat_bytes(device.current().on_host(part(tensor)))
    return flat.numpy().data if flat.numel() else memoryview(b"")
