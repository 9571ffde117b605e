"""Digests of tensors and the bytes that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from tmd.fabric import device
from tmd.fabric.packing import flat_bytes, pack
from tmd.trainer.state.device_digest import digest_from, sums_of
from tmd.trainer.state.dtensors import local_part

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
            yield memoryview(b"".join(raws(group)))


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


def covered(tensors: Sequence[Tensor], on_device: Sequence[bool]) -> list[bytes | memoryview]:
    """What of each tensor enters the digest of a state: its bytes, or a digest of them.

    ``on_device``: whether a device holds the parameter that a tensor belongs to. If so, the digest
    of a large tensor enters, wherever a worker keeps the tensor itself.
    """
    parts = [local_part(tensor) for tensor in tensors]
    summed = [on and own.nbytes >= PACK_BELOW for own, on in zip(parts, on_device, strict=True)]
    found = raws([sums_of(own) if sums else own for own, sums in zip(parts, summed, strict=True)])
    return [
        digest_from(own, content) if sums else content
        for own, sums, content in zip(parts, summed, found, strict=True)
    ]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of the part of ``tensor`` that this rank holds, in host memory."""
    flat = flat_bytes(device.current().on_host(local_part(tensor)))
    return flat.numpy().data if flat.numel() else memoryview(b"")


def raws(tensors: Iterable[Tensor]) -> list[memoryview]:
    """:func:`raw` of each, with one wait for the device of all.

    The bytes of a tensor in host memory are a view of it: use them before it changes.
    """
    parts = [local_part(tensor) for tensor in tensors]
    there = [own for own in parts if device.current().holds(own)]
    if not there:
        return [raw(own) for own in parts]
    body = device.current().host_memory((sum(own.nbytes for own in there),), torch.uint8)
    pack(there, body)
    copies = iter(torch.split(body, [own.nbytes for own in there]))
    return [raw(next(copies) if device.current().holds(own) else own) for own in parts]
