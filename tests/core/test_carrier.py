"""What carries collectives follows from the environment and the hardware."""

import pytest

from tmd.core.values.errors import ConfigError
from tmd.core.worker.carrier import (
    Carrier,
    CudaFacts,
    beside_obstacle,
    choose,
    described,
    name_of,
)

GPUS = CudaFacts(devices=8, nccl=(2, 29, 7))
NO_GPU = CudaFacts(devices=0, nccl=None)


def test_nccl_carries_where_there_are_gpus() -> None:
    choice = choose({}, GPUS)
    assert choice.carrier is Carrier.NCCL
    assert choice.reason == "8 GPUs and NCCL 2.29.7"


def test_without_a_gpu_tmd_carries_everything() -> None:
    assert choose({}, NO_GPU) == (Carrier.OWN, "torch finds no GPU")


def test_staging_can_be_chosen() -> None:
    assert choose({"TMD_CUDA": "staged"}, GPUS) == (Carrier.OWN, "TMD_CUDA=staged")


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ((2, 26, 1), "NCCL 2.26.1 may hang when a peer is lost: install 2.26.2 or later"),
        ((2, 28, 3), "NCCL 2.28.3 may crash when a peer is lost: install 2.28.9 or later"),
        ((2, 28, 8), "NCCL 2.28.8 may crash when a peer is lost: install 2.28.9 or later"),
    ],
)
def test_a_version_that_does_not_survive_a_loss_is_not_used(
    version: tuple[int, ...], remedy: str
) -> None:
    """tmd's own collectives are used instead. Asking for NCCL explicitly is an error."""
    facts = GPUS._replace(nccl=version)
    assert choose({}, facts) == (Carrier.OWN, remedy)
    with pytest.raises(ConfigError, match="TMD_CUDA=nccl, but NCCL"):
        choose({"TMD_CUDA": "nccl"}, facts)


@pytest.mark.parametrize("version", [(2, 26, 2), (2, 28, 2), (2, 28, 9)])
def test_other_versions_are_used(version: tuple[int, ...]) -> None:
    assert choose({}, GPUS._replace(nccl=version)).carrier is Carrier.NCCL


@pytest.mark.parametrize("cpu", ["own", "ring"])
def test_nccl_is_refused_in_a_build_without_it(cpu: str) -> None:
    """Also where another variable chooses the carrier."""
    with pytest.raises(ConfigError, match="this build of torch has no NCCL"):
        choose({"TMD_CUDA": "nccl", "TMD_CPU": cpu}, GPUS._replace(nccl=None))


def test_groups_are_built_beside_training_unless_the_environment_says_otherwise() -> None:
    assert beside_obstacle({}) == ""
    assert beside_obstacle({"TMD_BUILD": "beside"}) == ""
    assert beside_obstacle({"TMD_BUILD": "switch"}) == "TMD_BUILD=switch"
    with pytest.raises(ConfigError, match="TMD_BUILD=never: it must be one of beside, switch"):
        beside_obstacle({"TMD_BUILD": "never"})


@pytest.mark.parametrize("name", ["TMD_CUDA", "TMD_CPU"])
def test_an_unknown_value_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=mpi: it must be one of"):
        choose({name: "mpi"}, GPUS)


@pytest.mark.parametrize("carrier", [Carrier.RING, Carrier.GLOO])
def test_a_variable_for_tests_selects_the_carrier(carrier: Carrier) -> None:
    assert choose({"TMD_CPU": carrier}, NO_GPU) == (carrier, f"TMD_CPU={carrier}")


def test_a_worker_reports_the_version_of_nccl() -> None:
    """Members of one group need the same. Staged collectives need none."""
    assert name_of(choose({}, GPUS), GPUS) == "nccl 2.29.7"
    assert name_of(choose({"TMD_CUDA": "staged"}, GPUS), GPUS) == "own"


def test_a_single_gpu_is_one() -> None:
    assert choose({}, GPUS._replace(devices=1)).reason == "1 GPU and NCCL 2.29.7"


DRIVEN = GPUS._replace(driver="580.65.06")
UNASKED = CudaFacts(devices=0, nccl=None, asked=False)


@pytest.mark.parametrize(
    ("outcome", "facts", "text"),
    [
        (
            "nccl: 8 GPUs and NCCL 2.29.7",
            DRIVEN,
            "nccl: 8 GPUs and NCCL 2.29.7; driver 580.65.06",
        ),
        (
            "own: TMD_CUDA=staged",
            DRIVEN,
            "own: TMD_CUDA=staged; 8 GPUs, driver 580.65.06, NCCL 2.29.7",
        ),
        (
            "own: TMD_CUDA=staged",
            DRIVEN._replace(devices=1, nccl=None),
            "own: TMD_CUDA=staged; 1 GPU, driver 580.65.06, torch has no NCCL",
        ),
        (
            "own: torch finds no GPU",
            DRIVEN._replace(devices=0),
            "own: torch finds no GPU; driver 580.65.06, NCCL 2.29.7",
        ),
        (
            "own: torch finds no GPU",
            UNASKED,
            "own: torch finds no GPU; no driver, NCCL was not looked for",
        ),
        (
            "TMD_CUDA=nccl, but torch finds no GPU",
            UNASKED._replace(driver="580.65.06"),
            "TMD_CUDA=nccl, but torch finds no GPU; driver 580.65.06, NCCL was not looked for",
        ),
    ],
)
def test_the_machine_is_named_beside_the_outcome(outcome: str, facts: CudaFacts, text: str) -> None:
    """GPUs, driver and NCCL, each once; a missing driver does not read like a missing GPU."""
    assert described(outcome, facts) == text
