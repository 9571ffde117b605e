"""The worker process through the real bindings, and a driver that never returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tmd_detectors.children import Ended, Hung
from tmd_detectors.nvml.detector import NvmlConfig, NvmlDetector
from tmd_detectors.nvml.probe import nvml_worker
from tmd_detectors.nvml.report import Gpu

from tests.plugins.context import signals_of
from tmd.plugin import Severity, State

ROOT = Path(__file__).parents[3]
FIRST, SECOND = "0000:3b:00.0", "0000:3c:00.0"


@pytest.fixture
async def probe(script, tmp_path):
    probe = nvml_worker(str(tmp_path / "sys"))
    yield probe
    await probe.close()


@pytest.fixture
def watch(script, tmp_path):
    def run(**changes):
        settings = {"interval_s": 0.01, "deadline_s": 30.0, "sysfs": str(tmp_path / "sys")}
        return signals_of(NvmlDetector(), NvmlConfig(**(settings | changes)), tmp_path)

    return run


async def test_a_healthy_host_gives_no_signal(probe):
    report = await probe.ask(30)

    assert report.codes == {}
    assert [(g.pci, g.uuid) for g in report.gpus] == [(FIRST, "GPU-0"), (SECOND, "GPU-1")]
    gpu = report.gpus[0]
    assert (gpu.recovery, gpu.remap_pending, gpu.remap_failed) == (0, False, False)
    assert (gpu.uncorrected, gpu.sram_threshold, gpu.reasons) == (0, False, 0)
    assert (gpu.temperature, gpu.below_slowdown) == (40, 50)
    assert (gpu.width, gpu.max_width) == (16, 16)
    assert (gpu.links, gpu.link_errors) == ({}, None)


async def test_every_fact_comes_from_its_own_call(probe, script):
    script.put(
        {
            "1.field230": 4,
            "1.pending": 1,
            "1.failed": 1,
            "1.ecc": 7,
            "1.sram": 1,
            "1.reasons": 0x48,
            "1.temperature": 91,
            "1.width": 8,
            "1.link0": 1,
            "1.link1": 0,
            "1.field52": 3,
            "1.field59": 2,
        }
    )
    healthy, sick = (await probe.ask(30)).gpus

    assert healthy.recovery == 0
    assert sick == Gpu(
        pci=SECOND,
        uuid="GPU-1",
        codes=sick.codes,
        recovery=4,
        remap_pending=True,
        remap_failed=True,
        uncorrected=7,
        sram_threshold=True,
        reasons=0x48,
        temperature=91,
        below_slowdown=-1,
        links={0: True, 1: False},
        link_errors=5,
        width=8,
        max_width=16,
    )


async def test_an_old_driver_gives_fewer_facts(probe, script):
    script.put({"field230": None, "nvmlDeviceGetRemappedRows.ret": 3})
    gpu = (await probe.ask(30)).gpus[0]

    assert (gpu.recovery, gpu.remap_pending) == (None, None)
    assert gpu.codes["field 230"] == 3
    assert gpu.codes["nvmlDeviceGetRemappedRows"] == 3
    assert gpu.temperature == 40


async def test_a_new_gpu_counts_its_temperature_down(probe, script):
    """Its slow-down lies two degrees beyond the highest operating temperature."""
    script.put({"margin": 3, "field194": -2})
    gpu = (await probe.ask(30)).gpus[0]

    assert gpu.below_slowdown == 5


async def test_links_whose_state_cannot_be_read_are_unknown(probe, script):
    """Not down, and not gone: only a link that the GPU does not have ends the list."""
    script.put({"1.link0": 1, "1.nvmlDeviceGetNvLinkState.ret": 999})
    healthy, sick = (await probe.ask(30)).gpus

    assert healthy.codes == {}
    assert (sick.links, sick.codes) == ({}, {"nvmlDeviceGetNvLinkState": 999})


async def test_a_gpu_that_is_lost_later_is_still_known(probe, script):
    await probe.ask(30)
    script.put({"1.nvmlDeviceGetHandleByIndex_v2.ret": 15})
    healthy, lost = (await probe.ask(30)).gpus

    assert healthy.codes == {}
    assert (lost.pci, lost.codes) == (SECOND, {"nvmlDeviceGetHandleByIndex": 15})


async def test_a_driver_loaded_later_is_used(probe, script):
    script.put({"nvmlInitWithFlags.ret": 9})
    without = await probe.ask(30)
    script.put({"nvmlInitWithFlags.ret": None})

    assert (without.codes, without.gpus) == ({"nvmlInit": 9}, ())
    assert len((await probe.ask(30)).gpus) == 2


async def test_gpus_bound_to_the_driver_are_read_from_sysfs(probe, tmp_path):
    devices = {FIRST: "0x030200", "0000:3e:00.0": "0x068000", "0000:3f:00.0": "0x030000"}
    for name, kind in devices.items():
        device = tmp_path / "sys/bus/pci/drivers/nvidia" / name
        device.mkdir(parents=True)
        (device / "class").write_text(kind + "\n")
        (device / "vendor").write_text("0x10de\n")

    assert (await probe.ask(30)).bound == (FIRST, "0000:3f:00.0")  # the other is an NVSwitch


async def test_a_worker_that_dies_is_replaced(probe, script):
    script.put({"nvmlInitWithFlags.delay": "inf"})
    with pytest.raises(Hung):
        await probe.ask(0.5)
    script.put({"nvmlInitWithFlags.delay": None})
    first = await probe.ask(30)
    os.kill(probe._children.active.pid, 9)
    with pytest.raises(Ended):
        await probe.ask(30)

    assert await probe.ask(30) == first


async def test_a_sick_gpu_becomes_a_signal_and_is_cleared(watch, script):
    script.put({"1.field230": 1})
    async with watch() as signals:
        raised = await anext(signals)
        script.put({"1.field230": 0})
        cleared = await anext(signals)

    assert (raised.code, raised.entity) == ("nvml.recovery_action", f"pci:{SECOND}")
    assert (raised.severity, cleared.state) == (Severity.FATAL, State.CLEARED)
    assert "uuid GPU-1" in raised.evidence


async def test_a_hanging_driver_is_a_finding_until_it_returns(watch, script):
    script.put({"nvmlDeviceGetCount_v2.delay": "inf"})
    async with watch(deadline_s=0.5) as signals:
        first, second = await anext(signals), await anext(signals)
    async with watch() as signals:
        script.put({"nvmlDeviceGetCount_v2.delay": None, "0.field230": 2})
        other = await anext(signals)

    assert [s.code for s in (first, second)] == ["nvml.hung", "nvml.hung"]
    assert [s.severity for s in (first, second)] == [Severity.WARNING, Severity.DEGRADED]
    assert other.code == "nvml.recovery_action"


def test_the_daemon_can_stop_while_the_driver_hangs(script, tmp_path):
    """asyncio.run returns, and the process ends, although the reading never does."""
    script.put({"nvmlDeviceGetCount_v2.delay": "inf"})
    code = (
        "import asyncio, pathlib, sys\n"
        "from tests.plugins.context import signals_of\n"
        "from tmd_detectors.nvml.detector import NvmlConfig, NvmlDetector\n"
        "async def main():\n"
        "    config = NvmlConfig(interval_s=0.01, deadline_s=0.3)\n"
        "    state = pathlib.Path(sys.argv[1])\n"
        "    async with signals_of(NvmlDetector(), config, state) as signals:\n"
        "        print((await anext(signals)).code)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=ROOT,
    )

    assert done.stdout == "nvml.hung\n"


async def test_a_gpu_that_was_lost_before_a_restart_is_still_missed(watch, script, tmp_path):
    """NVML counts one GPU less when the daemon starts again."""
    script.put({"1.field230": 1})
    async with watch() as signals:
        assert (await anext(signals)).code == "nvml.recovery_action"
        script.put({"1.field230": 0})
        await anext(signals)  # by now, the GPUs of the first reading are saved
    script.put({"count": 1})
    async with watch() as signals:
        missing = await anext(signals)

    assert (missing.code, missing.entity) == ("nvml.missing", f"pci:{SECOND}")
    assert missing.severity is Severity.FATAL


async def test_a_lost_gpu_that_was_declared_healthy_is_not_missed_after_a_restart(script, tmp_path):
    detector, config = NvmlDetector(), NvmlConfig(interval_s=0.01, sysfs=str(tmp_path / "sys"))
    script.put({"1.field230": 1})
    async with signals_of(detector, config, tmp_path) as signals:
        await anext(signals)
        script.put({"count": 1})
        missing = await anext(signals)
        detector.declared_healthy("nvml.missing")
        script.put({"0.field230": 1})
        await anext(signals)
        script.put({"0.field230": 0})
        await anext(signals)
    script.put({"0.field230": 1})
    async with signals_of(NvmlDetector(), config, tmp_path) as signals:
        first = await anext(signals)
        script.put({"0.field230": 0, "count": 2})
        second = await anext(signals)

    assert missing.code == "nvml.missing"
    assert [s.code for s in (first, second)] == ["nvml.recovery_action"] * 2


async def test_a_memory_of_the_gpus_that_cannot_be_written_is_reported(script, tmp_path):
    nowhere = tmp_path / "nowhere"
    config = NvmlConfig(interval_s=0.01, sysfs=str(tmp_path / "sys"))
    async with signals_of(NvmlDetector(), config, nowhere) as signals:
        raised = await anext(signals)
        nowhere.mkdir()
        cleared = await anext(signals)

    assert (raised.code, raised.state) == ("nvml.gpus_not_kept", State.RAISED)
    assert str(nowhere / "gpus.json") in raised.message
    assert (cleared.code, cleared.state) == ("nvml.gpus_not_kept", State.CLEARED)


def test_without_the_library_the_detector_is_unsupported(script):
    code = "from tmd_detectors.nvml.detector import NvmlDetector; print(NvmlDetector().supported())"
    environment = dict(os.environ)
    with_shim = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    del environment["LD_LIBRARY_PATH"]
    without = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)

    assert with_shim == "None\n"
    assert without == "None\n" or "libnvidia-ml.so.1" in without
