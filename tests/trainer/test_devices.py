"""A worker names its GPUs as the kernel log and NVML do."""

from types import SimpleNamespace

import pynvml
import pytest
import torch
from torch import nn

from tmd.trainer.state.devices import devices_of, named


def test_a_gpu_has_the_name_that_findings_give_it() -> None:
    """Domain, bus and device in hexadecimal; the function is always 0."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)

    assert named(properties) == "pci:0001:3b:00.0"


def test_a_torch_without_pci_addresses_gives_no_name() -> None:
    assert named(SimpleNamespace(uuid="GPU-1")) is None


def test_a_worker_without_a_gpu_names_none() -> None:
    assert devices_of([nn.Linear(2, 2), nn.ReLU()]) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nvml_knows_the_gpu_by_that_name() -> None:
    (name,) = devices_of([nn.Linear(2, 2, device="cuda")])
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(name.removeprefix("pci:").encode())
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    finally:
        pynvml.nvmlShutdown()

    assert str(torch.cuda.get_device_properties("cuda").uuid) in str(uuid)
