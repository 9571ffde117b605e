"""The process that waits for the driver's XID events. A wedged driver never returns from the wait,
so the daemon never waits for this process.

It writes a line after each wait and ends when its reader is gone or a call fails: handles are
stale after a GPU was lost or the driver was reloaded, so a new process starts over.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pynvml as nvml

from .xid_event import XidEvent

T = TypeVar("T")

XID = nvml.nvmlEventTypeXidCriticalError
DIRECTIVE = 154
NOWHERE = 0xFFFFFFFF
"""No MIG instance."""


class CallFailed(Exception):
    """A call failed that is required to receive events."""


def main(wait_ms: str) -> None:
    with suppress(BrokenPipeError):
        try:
            _listen(int(wait_ms))
        except CallFailed as error:
            _send(XidEvent(ended=str(error)))


def _listen(wait_ms: int) -> None:
    _call(nvml.nvmlInit)
    events = _call(nvml.nvmlEventSetCreate)
    names, deaf = _registered(events)
    if not names:
        raise CallFailed("; ".join(deaf) or "the driver shows no GPU")
    _send(XidEvent(gpus=len(names), deaf=tuple(deaf)))
    while True:
        _send(_waited(events, names, wait_ms))


def _registered(events: Any) -> tuple[dict[int, str], list[str]]:
    """Handle -> PCI address of the GPUs whose XIDs are received, and why others' are not.

    The addresses are kept because a lost GPU no longer reports its own.
    """
    names: dict[int, str] = {}
    deaf = []
    for index in range(_call(nvml.nvmlDeviceGetCount)):
        try:
            handle = _call(nvml.nvmlDeviceGetHandleByIndex, index)
            pci = _pci(_call(nvml.nvmlDeviceGetPciInfo, handle))
            # Older drivers refuse event types that they do not know.
            if not _call(nvml.nvmlDeviceGetSupportedEventTypes, handle) & XID:
                raise CallFailed("does not report XIDs")
            _call(nvml.nvmlDeviceRegisterEvents, handle, XID, events)
            names[_number(handle)] = pci
        except CallFailed as error:
            deaf.append(f"GPU {index}: {error}")
    return names, deaf


def _waited(events: Any, names: dict[int, str], wait_ms: int) -> XidEvent:
    try:
        event = nvml.nvmlEventSetWait_v2(events, wait_ms)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_TIMEOUT:
            return XidEvent()
        raise CallFailed(f"nvmlEventSetWait_v2 returned {error.value}") from None
    xid = int(event.eventData)
    if not event.eventType & XID or not xid:
        return XidEvent()  # events of other kinds carry no number
    known = names.get(_number(event.device))
    return XidEvent(
        xid,
        known or _pci(_call(nvml.nvmlDeviceGetPciInfo, event.device)),
        "" if event.gpuInstanceId == NOWHERE else f"GPU-I:{event.gpuInstanceId:02d}",
        _action(event.device) if xid == DIRECTIVE else None,
    )


def _action(handle: Any) -> int | None:
    try:
        field = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except nvml.NVMLError:
        return None
    return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else None


def _call(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        raise CallFailed(f"{function.__name__} returned {error.value}") from None


def _number(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _pci(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _send(event: XidEvent) -> None:
    print(json.dumps(event), flush=True)
