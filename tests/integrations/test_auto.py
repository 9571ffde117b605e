"""What ``tmd launch --auto`` refuses, with the reason, instead of training without protection."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.frameworks import need
from tests.marks import thorough
from tmd.command import attached
from tmd.core.values.errors import ConfigError
from tmd.integrations import auto

GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print("trained")
"""
OTHER_TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments
from transformers.trainer_seq2seq import Seq2SeqTrainer
args = Seq2SeqTrainingArguments("out", use_cpu=True, report_to="none")
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
Seq2SeqTrainer(model, args, train_dataset=[]).train()
print("trained")
"""
STRATEGY = """
import lightning.pytorch as pl
pl.Trainer(strategy="fsdp", accelerator="cpu")
print("trained")
"""
OTHER_PACKAGE = """
import sys, types
sys.path.insert(0, ".")
import pytorch_lightning
print("trained")
"""
LOOP = """
import importlib.util, torch
importlib.util.find_spec("transformers")
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
print("trained")
"""
ACCELERATOR = """
from accelerate import Accelerator
Accelerator(cpu=True)
print("trained")
"""
OWN_LOOP = """
import torch
from accelerate import Accelerator
from transformers import TrainingArguments
args = TrainingArguments("out", use_cpu=True, report_to="none")
model = torch.nn.Linear(1, 1)
model, optimizer = Accelerator().prepare(model, torch.optim.SGD(model.parameters()))
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
print("trained")
"""
PROBED = """
import importlib.util
assert importlib.util.find_spec("transformers")
import transformers
print(transformers.Trainer.__module__)
raise SystemExit
"""
TUNED = """
from peft import LoraConfig
from transformers import Seq2SeqTrainer
from trl import SFTConfig, SFTTrainer
for each in (Seq2SeqTrainer, SFTConfig, SFTTrainer):
    print(each.__module__)
raise SystemExit
"""
STAGES = """
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = L.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
trainer.fit(BoringModel())
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
for _ in range(2):
    torch.optim.SGD([weight]).step()
print("trained")
"""
STOPPED = """
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
class Enough(Exception): ...
class Model(BoringModel):
    def on_train_batch_end(self, *_):
        if self.global_step == 2:
            raise Enough
trainer = L.Trainer(max_steps=9, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
try:
    trainer.fit(Model())
except Enough:
    pass
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
print("trained")
"""
OTHER_LOOP = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Mine(Trainer):
    def _run_epoch(self, **named):
        print("trained")
args = TrainingArguments("out", use_cpu=True, report_to="none")
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
Mine(model, args, train_dataset=[]).train()
"""
NOTHING = """
print("done")
"""
EXITS = """
import sys
def main(): ...
sys.exit(main())
"""
FAILS = """
import sys
sys.exit(7)
"""
FIT = """
import inspect
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = L.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0)
trainer.fit(BoringModel())
assert "max_epochs" in inspect.signature(L.Trainer).parameters, "as jsonargparse reads it"
print(type(trainer.strategy).__name__)
"""


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(text)
    command = [sys.executable, *attached([str(script)])]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=110)


@pytest.mark.parametrize(
    ("framework", "text", "why"),
    [
        ("", GROUP, "this script makes its own process group"),
        ("transformers", OTHER_TRAINER, "does not know Seq2SeqTrainer"),
        thorough("lightning", STRATEGY, "does not know Trainer(strategy='fsdp')"),
        thorough("lightning", OTHER_PACKAGE, "write 'import lightning.pytorch as pl'"),
        ("accelerate", ACCELERATOR, "add the lines of docs/start/accelerate.md"),
        thorough("transformers", OWN_LOOP, "this script calls an optimizer without one"),
        thorough("transformers", OTHER_LOOP, "Mine has a _run_epoch of its own"),
        ("", LOOP, "this script calls an optimizer without one"),
        ("", NOTHING, "did not train with the Trainer of transformers, TRL, Lightning or"),
        ("", EXITS, "did not train with the Trainer of transformers, TRL, Lightning or"),
    ],
    ids=[
        "group",
        "trainer",
        "strategy",
        "package",
        "accelerator",
        "own",
        "other",
        "loop",
        "none",
        "exits",
    ],
)
def test_what_is_not_known_is_refused_before_it_trains(
    framework: str, text: str, why: str, tmp_path: Path
) -> None:
    if framework:
        need(framework)
    ended = run(tmp_path, text)
    assert ended.returncode == 1, ended.stderr
    assert why in ended.stderr
    assert "trained" not in ended.stdout


@pytest.mark.parametrize("text", [STAGES, thorough(STOPPED)], ids=["ends", "raises"])
def test_a_loop_after_the_trainer_is_warned_of(text: str, tmp_path: Path) -> None:
    """It is not refused: what was trained may not be saved yet."""
    need("lightning")
    ended = run(tmp_path, text)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("goes on with an optimizer of its own: tmd does not protect") == 1
    assert "trained" in ended.stdout


def test_the_exit_status_of_a_script_that_fails_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, FAILS).returncode == 7


@pytest.mark.parametrize(
    ("place", "name", "refused"),
    [
        ("lib/python3.11/site-packages/other/trainer.py", "other.trainer", True),
        ("lib/python3/dist-packages/other/trainer.py", "other.trainer", True),  # of Debian's pip
        ("home/site-packages-of-mine/trainer.py", "trainer_of_mine", False),
        ("home/torchtitan/torchtitan/models/flux/trainer.py", "torchtitan.models.flux", True),
    ],
)
def test_a_trainer_of_another_package_is_refused(place: str, name: str, refused: bool) -> None:
    """It may have a state of its own. One that the user wrote is theirs to register. torchtitan
    itself is often run from a checkout."""
    module = ModuleType(name)
    module.__file__ = f"/{place}"
    other = type("Other", (dict,), {"__module__": name})
    sys.modules[name] = module
    try:
        with pytest.raises(auto.Unsupported, match="Other") if refused else nullcontext():
            auto._refuse_foreign(other, dict, "torchtitan")
    finally:
        del sys.modules[name]


def test_a_trainer_of_lightning_gets_the_strategy(tmp_path: Path) -> None:
    need("lightning")
    ended = run(tmp_path, FIT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] == "TmdStrategy"


@pytest.mark.thorough
def test_trainers_that_build_on_the_one_of_transformers_are_replaced(tmp_path: Path) -> None:
    need("trl")
    ended = run(tmp_path, TUNED)
    modules = ["tmd.integrations.transformers.seq2seq", *["tmd.integrations.trl"] * 2]
    assert ended.stdout.split() == modules, ended.stderr


@pytest.mark.thorough
def test_a_framework_is_found_though_the_script_has_looked_for_it_before(tmp_path: Path) -> None:
    need("transformers")
    ended = run(tmp_path, PROBED)
    assert ended.stdout.split() == ["tmd.integrations.transformers.trainer"], ended.stderr


def test_help_of_a_script_is_no_failure(tmp_path: Path) -> None:
    ended = run(tmp_path, "import argparse; argparse.ArgumentParser().parse_args(['--help'])")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (["-m"], "-m is given nothing"),
        (["-m", "nowhere.train"], "there is no module nowhere"),
        (["no.py"], "no file no.py"),
        (["train.sh"], "train.sh is neither a Python file nor -m MODULE"),
    ],
    ids=" ".join,
)
def test_only_python_that_is_there_can_be_attached_to(script: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        attached(script)
