"""Tensors as plain memory, and the scratch memory of a thread."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

EMPTY = memoryview(bytearray())
KEPT = 4 << 20


@lru_cache(maxsize=512)
def _array(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size


def view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. The caller keeps the tensor alive during use."""
    size = tensor.nbytes
    if size == 0:
        return EMPTY
    return memoryview(_array(size).from_address(tensor.data_ptr())).cast("B")


def plain(tensor: Tensor) -> Tensor:
    """``tensor`` itself if it is contiguous and plain, else a contiguous copy of its elements."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: Tensor) -> bool:
    """Whether :func:`plain` returns the tensor itself."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def writable(tensor: Tensor) -> Tensor:
    """A plain CPU tensor with the elements of ``tensor``, outside autograd. It can be written in
    any autograd mode and by any thread. If ``tensor`` is plain, both share their storage."""
    # `.data` leaves autograd and its version counters unchanged, as a C++ backend does.
    found = plain(tensor.data)
    if not found.is_inference():
        return found
    # Outside inference mode, torch refuses to write a tensor that was made in it.
    with torch.inference_mode(False):
        if not is_plain(tensor.data):
            return plain(tensor.data)
        alias = torch.empty(0, dtype=found.dtype, device=found.device)
        return alias.set_(
            found.untyped_storage(), found.storage_offset(), found.size(), found.stride()
        )


def writing() -> torch.inference_mode:
    """A context in which every tensor can be written: one that was made in inference mode can be
    written only there."""
    return torch.inference_mode()


def has_memory(tensor: Tensor) -> bool:
    """Whether all elements still have memory: FSDP1 frees that of a gathered buffer by resizing its
    storage, while the tensor keeps its shape."""
    if not tensor.numel():
        return True
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def empty_bytes(size: int) -> Tensor:
    """``size`` uninitialized bytes that can be written in any autograd mode, even if they are
    allocated in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


class Scratch:
    """Memory that one thread reuses; larger buffers than ``KEPT`` are not kept."""

    def __init__(self) -> None:
        self._buffer = empty_bytes(0)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements with any content, valid until the next call."""
        size = count * dtype.itemsize
        if size > KEPT:
            return torch.empty(count, dtype=dtype, device="cpu")
        if self._buffer.numel() < size:
            larger = 1 << (size - 1).bit_length()
            self._buffer = empty_bytes(larger)
        return self._buffer[:size].view(dtype)
