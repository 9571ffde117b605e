"""The digest of a tensor, computed on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import NEEDS_GPU
from tmd.trainer.state.device_digest import WORDS, sums_of

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 1001, 2 * WORDS + 3])
def test_it_has_the_same_bits_as_on_the_cpu(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size).mul(100).to(dtype)

    assert sums_of(tensor.cuda()).tolist() == sums_of(tensor).tolist()
