"""How a reduction combines two tensors, and the numbers of element types on the wire.

Partial results have the element type of the tensor, also for half and bfloat16 (as in Gloo). Every
partial result is computed once, or by two ranks with the same operands in the same order, so all
ranks get the same bits. Where both operands are known, the lower rank's comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}

Combine = Callable[..., Tensor]


def dtype_code(dtype: torch.dtype) -> int:
    """Number of an element type on the wire; 0 for a type that is only moved, never reduced."""
    return _CODES.get(dtype, 0)


@dataclass(frozen=True)
class Reduction:
    """``combine(low, high, out=...)`` merges two partial results."""

    code: int
    combine: Combine
    average: bool = False

    def is_position_independent(self, dtype: torch.dtype) -> bool:
        """Whether an element's result never depends on where in its tensor it is.

        torch combines the last few elements of a tensor by other instructions. They may round a
        complex product, or choose between zeros and NaNs, in another way.
        """
        chooses = self.combine in (torch.minimum, torch.maximum)
        return not (dtype.is_complex or (chooses and dtype.is_floating_point))

    def finish(self, tensor: Tensor, size: int) -> None:
        """Turn the merged result of ``size`` ranks into the final one, in place."""
        if not self.average:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(size)
        else:
            tensor.div_(size, rounding_mode="trunc")


_Op: Any = ReduceOp.RedOpType
_COMBINE: dict[object, Combine] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}
_TABLE = {
    op: Reduction(code, combine, op == _Op.AVG)
    for code, (op, combine) in enumerate(_COMBINE.items(), start=1)
}
_BITWISE = {_Op.BAND, _Op.BOR, _Op.BXOR}
_ORDERED = {_Op.MIN, _Op.MAX}


def combine_of(code: int) -> Combine:
    """How the reduction of this number merges two partial results."""
    return next(each.combine for each in _TABLE.values() if each.code == code)


def reduction(op: Any, dtype: torch.dtype, name: str) -> Reduction:
    """The reduction ``op`` for tensors of ``dtype``, for the function ``name`` of torch.

    Raises:
        ValueError: there is none; the message names an alternative.
    """
    kind = getattr(op, "op", op)
    word = str(kind).rpartition(".")[2]
    found = _TABLE.get(kind)
    if found is None:
        known = ", ".join(str(each).rpartition(".")[2] for each in _COMBINE)
        raise ValueError(
            f"{name} with {word}: the tmd backend supports {known}; multiply the tensor first and "
            "use SUM"
        )
    if dtype not in _CODES:
        raise ValueError(f"{name} of {dtype}: convert the tensor, to torch.float32 for example")
    if kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{name} with {word} needs integers or bool, not {dtype}: convert the tensor"
        )
    if kind in _ORDERED and dtype.is_complex:
        raise ValueError(
            f"{name} with {word}: complex numbers have no order: use torch.view_as_real or abs()"
        )
    if kind == _Op.AVG and dtype == torch.bool:
        raise ValueError(f"{name} with {word}: bool has no average: convert the tensor to a float")
    return found
