"""The ``Trainer`` of tmd against the one of transformers itself, without a daemon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.frameworks import need
from tests.marks import thorough

SCRIPT = Path(__file__).with_name("plain_script.py")
ROOT = Path(__file__).parents[2]


def train(
    whose: str,
    case: str,
    folder: Path,
    stop: int = 0,
    first: bool = False,
    resume: bool = False,
    apart: bool = False,
    **more: object,
) -> list[dict[str, Any]]:
    """Facts of both ranks, and the checkpoints.

    ``first``: evaluate before training, too. ``resume``: from the newest checkpoint. ``apart``:
    each rank has a folder of its own. ``more``: arguments besides those of ``case``.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), whose, case, str(folder)),
                *("--stop", str(stop), "--more", json.dumps(more)),
                *("--first" for _ in range(first)),
                *("--resume" for _ in range(resume)),
                *("--apart" for _ in range(apart)),
            ],
            cwd=ROOT,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("TMD_")},
                **common,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=100)
            assert rank.returncode == bool(stop), output.decode()[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if stop:
        return []
    facts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    saved = sorted(each.name for each in (folder / "out").glob("checkpoint-*"))
    return [*facts, {"checkpoints": saved}]


@pytest.mark.parametrize(
    "case",
    ["epochs", *map(thorough, ("generates", "steps", "mixed", "stream"))],
)
def test_it_trains_as_the_original_does(case: str, tmp_path: Path) -> None:
    """The same losses, evaluations, counts, best checkpoint and weights, on both ranks."""
    need("transformers")
    theirs = train("theirs", case, tmp_path / "theirs")

    ours = train("ours", case, tmp_path / "ours")

    assert ours == theirs


@pytest.mark.thorough
@pytest.mark.parametrize("bf16", [False, True], ids=["in float32", "in bfloat16"])
def test_an_evaluation_before_training_changes_no_number(bf16: bool, tmp_path: Path) -> None:
    """The ranks train together. In transformers each would train by itself from there on."""
    need("transformers")
    settings: dict[str, Any] = {"max_steps": 3, "bf16": bf16}
    plain = train("ours", "limit", tmp_path / "plain", **settings)

    facts = train("ours", "limit", tmp_path / "evaluated", first=True, **settings)

    weights = [each["weights"] for each in facts[:2]]
    assert weights == [plain[0]["weights"]] * 2


@pytest.mark.thorough
@pytest.mark.timeout(240)  # three jobs, one after the other
def test_it_goes_on_from_a_session_checkpoint(tmp_path: Path) -> None:
    """A job that ended in the middle of an epoch ends with the numbers of one that did not. It
    logs again from the checkpoint on."""
    need("transformers")
    whole = train("ours", "mixed", tmp_path / "whole")
    train("ours", "mixed", tmp_path / "halves", stop=12)

    halves = train("ours", "mixed", tmp_path / "halves")

    for facts, like in zip(halves[:2], whole[:2], strict=True):
        logs, all_logs = facts.pop("logs"), like.pop("logs")
        assert 0 < len(logs) < len(all_logs)
        assert logs == all_logs[-len(logs) :]
    assert halves == whole


@pytest.mark.thorough
@pytest.mark.timeout(240)  # three jobs, one after the other
def test_a_job_of_more_epochs_goes_on_from_the_end_of_one_of_fewer(tmp_path: Path) -> None:
    """From a session checkpoint of the last step, with the weights of a job that never ended."""
    need("transformers")
    whole = train("ours", "limit", tmp_path / "whole", num_train_epochs=2, save_steps=11)
    train("ours", "limit", tmp_path / "parts", num_train_epochs=1, save_steps=11)
    (newest,) = (tmp_path / "parts" / "out" / "session").iterdir()

    parts = train("ours", "limit", tmp_path / "parts", num_train_epochs=2, save_steps=11)

    assert newest.name == "step-00000011"
    assert parts[0]["step"] == whole[0]["step"] == 22
    assert [facts["weights"] for facts in parts[:2]] == [facts["weights"] for facts in whole[:2]]


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_limit_that_ended_a_job_within_an_epoch_is_not_raised(tmp_path: Path) -> None:
    """The job had dropped the rest of the epoch, so that its numbers would be those of no job."""
    need("transformers")
    train("ours", "limit", tmp_path, max_steps=4, save_steps=4)

    with pytest.raises(
        AssertionError, match="at the end of a job of 4 steps, in the middle of an epoch"
    ):
        train("ours", "limit", tmp_path, max_steps=9, save_steps=4)


@pytest.mark.thorough
@pytest.mark.timeout(240)  # four jobs, one after the other
def test_a_job_without_tmd_is_resumed_and_then_goes_on_from_its_session(tmp_path: Path) -> None:
    """With the same argument each time, as a script that is started again has it."""
    need("transformers")
    begun: dict[str, Any] = {"save_steps": 3, "max_steps": 9}
    train("theirs", "limit", tmp_path / "halves", stop=4, **begun)
    shutil.copytree(tmp_path / "halves", tmp_path / "whole")
    whole = train("ours", "limit", tmp_path / "whole", resume=True, **begun)
    train("ours", "limit", tmp_path / "halves", stop=7, resume=True, **begun)

    halves = train("ours", "limit", tmp_path / "halves", resume=True, **begun)

    assert whole[0]["step"] == halves[0]["step"] == 9
    assert [facts["weights"] for facts in halves[:2]] == [facts["weights"] for facts in whole[:2]]


@pytest.mark.thorough
@pytest.mark.timeout(240)  # three jobs, one after the other
def test_a_streamed_job_is_resumed_after_its_first_pass_as_it_is_without_tmd(
    tmp_path: Path,
) -> None:
    """The checkpoint covers more than a pass, and transformers goes on with the next one."""
    need("transformers")
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    train("theirs", "stream", tmp_path / "ours", stop=6, **saves)
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    found = {
        whose: train(whose, "stream", tmp_path / whose, resume=True, **saves)
        for whose in ("theirs", "ours")
    }

    assert [facts[0]["step"] for facts in found.values()] == [12, 12]
    assert found["ours"][0]["weights"] == found["theirs"][0]["weights"]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"save_strategy": "no"}, {}], ids=["without saves", "with saves"])
def test_the_newest_of_no_checkpoints_is_the_beginning(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """A script that is started again by itself has the same argument at its first start."""
    need("transformers")
    facts = train("ours", "limit", tmp_path, resume=True, max_steps=2, save_steps=1, **more)

    assert facts[0]["step"] == 2


def test_ranks_that_would_begin_with_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """Each with a folder of its own: their optimizers would differ from the first step on."""
    need("transformers")
    (tmp_path / "out1" / "checkpoint-4").mkdir(parents=True)
    with pytest.raises(AssertionError, match="no checkpoint, and rank 1 with checkpoint-4"):
        train("ours", "limit", tmp_path, resume=True, apart=True, max_steps=2, save_steps=1)


REFUSED = """
import tempfile
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import TrainingArguments as Theirs
from tmd.integrations.transformers import Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
folder = tempfile.mkdtemp()
for kind, settings in (
    (Theirs, {}),
    (TrainingArguments, {"auto_find_batch_size": True}),
    (TrainingArguments, {"eval_on_start": True, "eval_strategy": "steps"}),
    (TrainingArguments, {"dataloader_persistent_workers": True}),
    (TrainingArguments, {"accelerator_config": {"dispatch_batches": True}}),
    (TrainingArguments, {"accelerator_config": {"use_seedable_sampler": False}}),
    (TrainingArguments, {"optim": "lomo"}),
    (TrainingArguments, {"batch_eval_metrics": True}),
    (TrainingArguments, {"enable_jit_checkpoint": True}),
    (TrainingArguments, {"save_on_each_node": True}),
    (TrainingArguments, {"eval_use_gather_object": True}),
):
    try:
        Trainer(model, kind(folder, use_cpu=True, report_to="none", **settings))
    except (TypeError, ValueError) as error:
        print("refused:", error)
class Mine(Trainer):
    def _run_epoch(self, **run):
        pass

try:
    Mine(model, TrainingArguments(folder, use_cpu=True, report_to="none"))
except TypeError as error:
    print("refused:", error)
from tmd.integrations.transformers.wrapping import refuse_unwrapped

from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling
from tmd.integrations.transformers.data import refuse_data

class Tokenizer:
    mask_token = "m"

for seed, processes in ((None, 0), (7, 2), (7, 0)):
    masked = DataCollatorForLanguageModeling(Tokenizer(), seed=seed)
    args = TrainingArguments(folder, use_cpu=True, dataloader_num_workers=processes)
    try:
        refuse_data(DataLoader([1], collate_fn=masked), args)
    except ValueError as error:
        print("refused:", error, processes)

refuse_unwrapped(model, 1)
try:
    refuse_unwrapped(model, 2)
except ValueError as error:
    print("refused:", error)
"""

IMPORTS = """
import sys
import accelerate
import transformers

def attempt():
    for name in [each for each in sys.modules if each.startswith("tmd.integrations.transformers")]:
        del sys.modules[name]
    try:
        import tmd.integrations.transformers
    except ImportError as error:
        print("refused:", error)

for missing in ("transformers", "accelerate"):
    kept, sys.modules[missing] = sys.modules[missing], None
    attempt()
    sys.modules[missing] = kept
del transformers.Trainer._run_epoch
attempt()
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TMD_")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """The reasons, all from one process, since it takes seconds to import transformers."""
    need("transformers")
    result = run(REFUSED + IMPORTS)
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith("refused:")]


def test_what_it_cannot_repeat_is_refused_by_name(refusals: list[str]) -> None:
    assert "import TrainingArguments from tmd.integrations.transformers" in refusals[0]
    for line, name in zip(
        refusals[1:-5],
        (
            "auto_find_batch_size",
            "eval_on_start",
            "dataloader_persistent_workers",
            "dispatch_batches",
            "use_seedable_sampler=False",
            "optim='lomo'",
            "batch_eval_metrics",
            "enable_jit_checkpoint",
            "save_on_each_node",
            "eval_use_gather_object",
            "Mine has a _run_epoch of its own",
        ),
        strict=True,
    ):
        assert name in line


def test_a_collator_with_a_generator_of_its_own_is_refused(refusals: list[str]) -> None:
    """A joiner would mask other words than the rank does."""
    (refusal,) = [line for line in refusals if "Collator" in line]

    assert "DataCollatorForLanguageModeling(seed=7): leave it out" in refusal
    assert refusal.endswith(" 0")


def test_a_model_whose_gradients_nothing_sums_is_refused(refusals: list[str]) -> None:
    """Each rank would train by itself. A single rank may."""
    assert "the GPT2LMHeadModel is not wrapped in DistributedDataParallel" in refusals[-4]
    assert "call evaluate() and predict() only after train()" in refusals[-4]


def test_a_missing_package_or_another_release_is_named_with_the_remedy(refusals: list[str]) -> None:
    """With another loop it would train without any protection."""
    *missing, other = refusals[-3:]

    for name, line in zip(("transformers", "accelerate"), missing, strict=True):
        assert f"needs {name}: run pip install 'tmd-trainmover[transformers]'" in line
    assert "whose Trainer has no _run_epoch" in other


RESUMED = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from tmd.integrations.transformers import Trainer, TrainingArguments

class Count(TrainerCallback, ExportableState):
    steps = 0

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_train_begin(self, args, state, control, **_):
        self.steps = 0
        control.should_epoch_stop = True

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        # As on a worker that takes rank 0.
        state.is_world_process_zero = state.global_step != 3

folder, resumed = sys.argv[1:]
args = TrainingArguments(
    folder, use_cpu=True, report_to="none", disable_tqdm=True, save_steps=2, num_train_epochs=3,
    per_device_train_batch_size=1, logging_strategy="no",
)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
rows = [{"input_ids": torch.tensor([i, 1]), "labels": torch.tensor([i, 1])} for i in range(2)]
count = Count()
trainer = Trainer(model, args, train_dataset=rows, callbacks=[count])
trainer.train(resume_from_checkpoint=resumed or None)
print(count.steps, trainer.state.global_step)
"""


def test_a_worker_that_takes_rank_0_keeps_the_state_of_callbacks(tmp_path: Path) -> None:
    """Although ``on_train_begin`` is called there. A job that begins with a checkpoint-N does not
    go on from the session checkpoints of this one, which count its epochs otherwise."""
    need("transformers")
    first = run(RESUMED, tmp_path, "")

    second = run(RESUMED, tmp_path, tmp_path / "checkpoint-2")

    assert first.stdout.splitlines()[-1] == "6 6", first.stderr
    assert second.returncode == 1
    assert "belongs to a job that began with no checkpoint: begin with the same" in second.stderr


REPLACING = """
import os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from tmd.integrations.transformers import Trainer, TrainingArguments

class InspectingTrainer(Trainer):
    def _write_checkpoint(self, *arguments):
        super()._write_checkpoint(*arguments)
        print("written", sorted(os.listdir(place)) == ["former"], os.path.isdir(folder + "/partly"))

    def _complete_checkpoint(self):
        for _ in range(2):  # each rank does
            super()._complete_checkpoint()

folder = sys.argv[1]
place = os.path.join(folder, "checkpoint-2")
args = TrainingArguments(
    folder, use_cpu=True, report_to="none", disable_tqdm=True, save_steps=2, max_steps=2,
    save_total_limit=1,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
rows = [{"input_ids": torch.tensor([i, 1]), "labels": torch.tensor([i, 1])} for i in range(2)]
InspectingTrainer(model, args, train_dataset=rows).train()
left = [name for name in os.listdir(folder) if "part" in name]
print(left, "model.safetensors" in os.listdir(place))
"""


def test_a_checkpoint_of_an_earlier_run_is_there_until_the_vote_on_its_replacement(
    tmp_path: Path,
) -> None:
    """With ``save_total_limit=1`` it is the only one, and the vote may never come."""
    need("transformers")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "former").touch()

    done = run(REPLACING, tmp_path)

    lines = done.stdout.splitlines()
    assert "written True True" in lines, done.stderr
    assert lines[-1] == "[] True"


FAILING = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from tmd.integrations.transformers import Trainer, TrainingArguments
from tmd.integrations.transformers.trainer import session

class Fails(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **_):
        raise OSError("no space left")

args = TrainingArguments(FOLDER, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
rows = [{"input_ids": torch.tensor([i, 1]), "labels": torch.tensor([i, 1])} for i in range(2)]
try:
    Trainer(model, args, train_dataset=rows, callbacks=[Fails()]).train()
except OSError:
    try:
        next(iter(session().batches([1])))
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.thorough
def test_a_step_whose_callback_fails_is_left(tmp_path: Path) -> None:
    """So that its rank takes part in nothing more, if the script catches the error."""
    need("transformers")
    done = run(FAILING.replace("FOLDER", repr(str(tmp_path))))

    assert "goes on after an error in a training step: no space left" in done.stdout, done.stderr


def test_a_callback_that_stops_training_in_on_log_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it decides there has no effect, since all ranks have agreed on the step before."""
    need("transformers")
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    from tmd.integrations.transformers.callbacks import HeldCallbacks

    class Budget(TrainerCallback):
        def on_log(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
        ) -> TrainerControl:
            return TrainerControl(should_training_stop=True)

    handler = HeldCallbacks([Budget(), TrainerCallback()], None, None, None, None)
    control = TrainerControl()
    with caplog.at_level("WARNING", "tmd.trainer"):
        caplog.clear()  # transformers asks for a callback of its own
        handler.release("on_save", None, None, control)
        assert caplog.messages == []
        for _ in range(2):
            handler.release("on_log", None, None, control, logs={})

    (message,) = caplog.messages
    assert message.startswith("Budget has set should_training_stop in on_log, which has no effect")
    assert not control.should_training_stop


def test_a_callback_that_cannot_begin_on_another_worker_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The job goes on without it: the next worker would not fare better."""
    need("transformers")
    from transformers import TrainerCallback, TrainerControl

    from tmd.integrations.transformers.callbacks import HeldCallbacks

    seen: list[str] = []

    class Reporter(TrainerCallback):
        _initialized = True

        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            assert not self._initialized
            if self.fails:
                raise OSError("no way out of this host")
            seen.append("begins")

        def on_log(self, *_: Any, **__: Any) -> None:
            seen.append("fails" if self.fails else "logs")

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            seen.append("ends")

    handler = HeldCallbacks([Reporter(True), Reporter(False)], None, None, None, None)
    control = TrainerControl()
    with caplog.at_level("ERROR", "tmd.trainer"):
        handler.begin_again(None, None, control)
    handler.release("on_log", None, None, control, logs={})
    handler.call_event("on_log", None, None, control, logs={})
    handler.call_event("on_epoch_end", None, None, control)

    assert seen == ["begins", "logs", "logs", "ends", "ends"]
    assert "Reporter does not begin here" in caplog.text


DRAWING = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from tmd.integrations.transformers import Trainer, TrainingArguments

class Draws(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        if state.global_step and draws:
            print("drawn")
            torch.rand(3)

    def on_step_end(self, args, state, control, **_):
        # As on a worker that takes rank 0.
        state.is_world_process_zero = state.global_step != 2

folder, draws = sys.argv[1], sys.argv[2] == "draws"
args = TrainingArguments(
    folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=4,
    per_device_train_batch_size=1, logging_strategy="no",
)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
rows = [{"input_ids": torch.tensor([i, 1]), "labels": torch.tensor([i, 1])} for i in range(4)]
Trainer(model, args, train_dataset=rows, callbacks=[Draws()]).train()
print(sum(p.double().sum() for p in model.parameters()).item().hex())
"""


def test_what_a_callback_draws_where_rank_0_goes_on_changes_no_number(tmp_path: Path) -> None:
    """It draws between the seed of a step and its dropout."""
    need("transformers")
    plain, drawing = (run(DRAWING, tmp_path, what).stdout.splitlines() for what in ("", "draws"))

    assert drawing.count("drawn") == 1
    assert drawing[-1] == plain[-1]
