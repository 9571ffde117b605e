"""The process that talks to the driver. A wedged driver never returns, so the daemon never waits.

One line on stdin requests one reading. The answer is one line of JSON on stdout. The process exits
at the end of stdin. It only reads: no CUDA context, and no queries of utilisation or of processes,
which disturb the GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml as nvml

from .report import Gpu, NvmlReport

T = TypeVar("T")

GPU_CLASSES = ("0x0300", "0x0302")
"""PCI classes of display and 3D controllers."""
NVIDIA = "0x10de"
UNCORRECTED, VOLATILE = 1, 0
NO_LINK = frozenset({nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED})
"""What NVML returns for the first link that a GPU does not have."""


class NvmlCall:
    """Makes calls and records the return codes of those that fail."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return function(*arguments)
        except nvml.NVMLError as error:
            self.codes[function.__name__] = error.value
            return None


class NvmlReader:
    """Remembers the index of each GPU: a lost GPU no longer reports its address."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = sysfs
        self._ready = False
        self._known: dict[int, tuple[str, str]] = {}

    def look(self) -> NvmlReport:
        call = NvmlCall()
        bound = tuple(sorted(_bound(self._sysfs)))
        if not self._ready:
            call(nvml.nvmlInit)
            self._ready = not call.codes
        if not self._ready:
            return NvmlReport(codes=call.codes, bound=bound)
        count = call(nvml.nvmlDeviceGetCount)
        gpus = [self._gpu(index) for index in range(count or 0)]
        return NvmlReport(call.codes, tuple(g for g in gpus if g is not None), bound)

    def _gpu(self, index: int) -> Gpu | None:
        call = NvmlCall()
        handle = call(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is not None:
            info, uuid = (
                call(nvml.nvmlDeviceGetPciInfo, handle),
                call(nvml.nvmlDeviceGetUUID, handle),
            )
            if info is not None:
                _, before = self._known.get(index, ("", ""))
                self._known[index] = (_pci(info), str(uuid or before))
        if index not in self._known:
            return None  # the judge reports it: sysfs shows it, NVML does not
        pci, uuid = self._known[index]
        if handle is None:
            return Gpu(pci, uuid, call.codes)
        facts = {**_memory(call, handle), **_clocks(call, handle), **_links(call, handle)}
        return Gpu(pci, uuid, call.codes, **facts)


def _memory(call: NvmlCall, handle: Any) -> dict[str, Any]:
    rows = call(nvml.nvmlDeviceGetRemappedRows, handle)
    sram = nvml.c_nvmlEccSramErrorStatus_v1_t()
    sram.version = nvml.nvmlEccSramErrorStatus_v1
    known = call(nvml.nvmlDeviceGetSramEccErrorStatus, handle, ctypes.byref(sram)) is not None
    return {
        "recovery": _field(call, handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        "remap_pending": bool(rows[2]) if rows else None,
        "remap_failed": bool(rows[3]) if rows else None,
        "uncorrected": call(nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
        "sram_threshold": bool(sram.bThresholdExceeded) if known else None,
    }


def _clocks(call: NvmlCall, handle: Any) -> dict[str, Any]:
    temperature = call(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return {
        "reasons": call(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        "temperature": temperature,
        "below_slowdown": _below_slowdown(call, handle, temperature),
        "width": call(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "max_width": call(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    }


def _below_slowdown(call: NvmlCall, handle: Any, temperature: int | None) -> int | None:
    """See :class:`Gpu`. From Ada on, NVML counts temperatures down from the highest operating one,
    and may no longer provide the threshold itself (see nvmlDeviceGetTemperatureThreshold in NVML's
    reference)."""
    newer = NvmlCall()  # a GPU or driver that lacks these calls has the older one
    margin: int | None = newer(nvml.nvmlDeviceGetMarginTemperature, handle)
    limit = _field(newer, handle, nvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT)
    if margin is not None and limit is not None:
        return margin - limit
    kind = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    threshold: int | None = call(nvml.nvmlDeviceGetTemperatureThreshold, handle, kind)
    return threshold - temperature if threshold and temperature is not None else None


def _links(call: NvmlCall, handle: Any) -> dict[str, Any]:
    states = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        ask = NvmlCall()
        state = ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is not None:
            states[link] = bool(state)
        elif NO_LINK.isdisjoint(ask.codes.values()):
            call.codes |= ask.codes  # the state of this link is unknown
        else:
            break
    if not states:
        return {}
    replays = _field(call, handle, nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL)
    recoveries = _field(call, handle, nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL)
    known = [n for n in (replays, recoveries) if n is not None]
    return {"links": states, "link_errors": sum(known) if known else None}


def _field(call: NvmlCall, handle: Any, number: int) -> int | None:
    values = call(nvml.nvmlDeviceGetFieldValues, handle, [number])
    if values is None:
        return None
    if values[0].nvmlReturn != nvml.NVML_SUCCESS:
        call.codes[f"field {number}"] = values[0].nvmlReturn
        return None
    kind, value = values[0].valueType, values[0].value
    if kind == nvml.NVML_VALUE_TYPE_SIGNED_INT:
        return int(value.siVal)
    wide = (nvml.NVML_VALUE_TYPE_UNSIGNED_LONG, nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    return int(value.ullVal if kind in wide else value.uiVal)


def _pci(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _bound(sysfs: str) -> list[str]:
    """GPUs that the kernel shows as bound to the NVIDIA driver."""
    found = []
    folder = f"{sysfs}/bus/pci/drivers/nvidia"
    for device in os.listdir(folder) if os.path.isdir(folder) else ():
        try:  # the folder also has files and a module
            kind, vendor = (_content(f"{folder}/{device}/{file}") for file in ("class", "vendor"))
        except OSError:
            continue
        if vendor == NVIDIA and kind[:6] in GPU_CLASSES:
            found.append(device)
    return found


def _content(file: str) -> str:
    with open(file) as opened:
        return opened.read().strip()


def main(sysfs: str) -> None:
    worker = NvmlReader(sysfs)
    for _ in sys.stdin:
        print(json.dumps(worker.look()), flush=True)
