"""Whether parameters have a gradient is set without another tensor in the place of one."""

from __future__ import annotations

import torch
from torch import nn

from tmd.trainer.state.gradients import set_graded


def test_a_gradient_that_is_a_view_keeps_its_memory() -> None:
    """As those of DistributedDataParallel with ``gradient_as_bucket_view``, which it reduces."""
    bucket = torch.ones(6)
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = bucket[2:].view(2, 2)
    set_graded([(param, True)])

    assert bucket.tolist() == [1, 1, 0, 0, 0, 0]
    assert param.grad.data_ptr() == bucket[2:].data_ptr()


def test_a_gradient_with_a_graph_loses_it() -> None:
    param = nn.Parameter(torch.ones(2))
    (param**3).sum().backward(create_graph=True)
    set_graded([(param, True)])

    assert param.grad is not None
    assert not param.grad.requires_grad
    assert param.grad.tolist() == [0, 0]


def test_parameters_get_a_gradient_of_zeros_or_none() -> None:
    without, graded = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    graded.grad = torch.ones(2)
    set_graded([(without, True), (graded, False)])

    assert without.grad is not None
    assert without.grad.tolist() == [0, 0]
    assert graded.grad is None
