"""Digests of tensors and the bytes that they cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from tmd.fabric import device
from tmd.trainer.state.device_digest import device_digest
from tmd.trainer.state.dtensors import part

Digest = dict[str, str]
"""Hexadecimal digests (xxh3-128) by part of the state."""
PACK_BELOW = 1 << 16
"""Bytes; smaller tensors travel packed into one buffer, for fewer system calls."""


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


def content(parameters: Iterable[Tensor]) -> Callable[[Tensor], bytes | memoryview]:
    """What digests of a state cover of a tensor: its bytes, or what a device computes of them.

    ``parameters``: those of the state. If a device holds any of them, its tensors in host memory
    are treated alike, so that it does not matter where a worker keeps which.
    """
    if any(device.current().holds(part(p)) for p in parameters):
        return lambda tensor: device_digest(part(tensor))
    return raw


def raw(tensor: Tensor) -> memoryview:
    flat = device.current().on_host(part(tensor)).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
