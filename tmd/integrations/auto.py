"""Runs a training script unchanged: its framework gets the adapter when it is imported.

``tmd launch --auto script.py`` starts ``python -m tmd.integrations.auto script.py``. It knows the
frameworks whose adapter needs no line in the script: those with a ``Trainer``, which owns the loop.
Whatever else a script trains with is refused with the reason, before its first step.
"""

from __future__ import annotations

import functools
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
import wrapt
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tmd.extras import is_installed

TRAINERS = "the Trainer of transformers, TRL, Lightning or torchtitan"
PAGE = "see docs/start/porting.md for the lines that it needs"

log = logging.getLogger("tmd.trainer")


class Unsupported(RuntimeError):
    """The script trains in a way that cannot be protected without a change."""


class Attachment:
    """What has become of the script so far."""

    grouped = False
    """Whether an adapter has made the process group."""
    trains = 0
    """Number of calls of a trainer's method that are under way; one may make another."""
    attached = False
    """Whether the trainers of transformers are those of tmd."""
    trained = False
    """Whether one of these has run an optimizer, or has ended."""

    def watch(self, trainer: type, name: str) -> None:
        """While this method of ``trainer`` runs, the adapter trains."""
        method = getattr(trainer, name)

        @functools.wraps(method)
        def training(*args: Any, **named: Any) -> Any:
            self.trains += 1
            try:
                result = method(*args, **named)
            finally:
                self.trains -= 1
            self.trained = True
            return result

        setattr(trainer, name, training)


attachment = Attachment()


def _before(owner: type, name: str, check: Callable[..., object]) -> None:
    """Call ``check`` with the same arguments before each call of a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def checked(*args: Any, **named: Any) -> Any:
        check(*args, **named)
        return method(*args, **named)

    setattr(owner, name, checked)


def _refuse_foreign(kind: type, ours: type, package: str, loop: Iterable[str] = ()) -> None:
    """Refuse a trainer without our class, or one of a package that builds on it, with a state of
    its own, or one that replaces the methods ``loop``. The framework's own ``package`` may be a
    checkout, whose files look like those of a user. An adapter that is derived from ``ours``
    is no foreign trainer."""
    above = kind.__mro__[: kind.__mro__.index(ours)] if issubclass(kind, ours) else (kind,)
    above = tuple(takewhile(lambda each: not _is_adapter(each), above))
    files = (getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in above)
    packaged = any(map(is_installed, files)) or any(
        each.__module__.partition(".")[0] == package for each in above
    )
    if packaged or not issubclass(kind, ours):
        raise Unsupported(f"tmd launch --auto does not know {kind.__name__}: {PAGE}")
    if changed := [name for name in loop if getattr(kind, name) is not getattr(ours, name)]:
        raise Unsupported(
            f"{kind.__name__} has a {changed[0]} of its own, which tmd launch --auto would have to "
            f"replace: {PAGE}"
        )


def _is_adapter(kind: type) -> bool:
    return kind.__module__.startswith("tmd.integrations.")


def _transformers(_: ModuleType) -> None:
    peft = sys.modules.get("peft")
    if attachment.attached or not (peft is None or hasattr(peft, "PeftModel")):
        return  # peft imports transformers, whose trainer imports peft
    attachment.attached = True
    from tmd.integrations import transformers as ours

    module: Any = sys.modules["transformers"]  # its import may put another one in its place

    def only_ours(trainer: Any, *_: object, **__: object) -> None:
        loop = ("_inner_training_loop", "_run_epoch")
        _refuse_foreign(type(trainer), ours.Trainer, "transformers", loop)

    _before(module.Trainer, "__init__", only_ours)
    attachment.watch(module.Trainer, "train")
    for name in ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"):
        setattr(module, name, getattr(ours, name))


def _trl(_: ModuleType) -> None:
    from tmd.integrations import trl as ours

    module: Any = sys.modules["trl"]
    for name in ours.__all__:
        setattr(module, name, getattr(ours, name))


def _torchtitan(_: ModuleType) -> None:
    from tmd.integrations import torchtitan as ours

    def only_ours(trainer: Any) -> None:
        _refuse_foreign(type(trainer), ours.Trainer, "torchtitan")
        training = trainer.config.training
        if not training.disable_cuda_graphs:
            log.warning("this job runs without CUDA graphs, which do not notice the loss of a rank")
            trainer.config.training = replace(training, disable_cuda_graphs=True)

    _before(ours.Trainer, "init_distributed", only_ours)
    attachment.watch(ours.Trainer, "train")
    module: Any = sys.modules["torchtitan.trainer"]
    module.Trainer = ours.Trainer


def _lightning(module: Any) -> None:
    from tmd.integrations.lightning import TmdStrategy

    trainer = module.Trainer
    make = trainer.__init__

    @functools.wraps(make)  # a command line may be built from its signature
    def with_strategy(self: Any, *args: Any, **named: Any) -> None:
        asked = named.get("strategy", os.environ.get("PL_TRAINER_STRATEGY", "auto"))
        if isinstance(asked, str) and asked in ("auto", "ddp"):
            named["strategy"] = TmdStrategy()
        elif not isinstance(asked, TmdStrategy):
            raise Unsupported(
                f"tmd launch --auto does not know Trainer(strategy={asked!r}): give 'ddp'"
            )
        make(self, *args, **named)

    trainer.__init__ = with_strategy
    attachment.watch(trainer, "fit")


def _accelerate(module: Any) -> None:
    def only_in_a_trainer(*_: object, **__: object) -> None:
        if not attachment.grouped:
            raise Unsupported(
                "tmd launch --auto cannot see where a step of a loop around an Accelerator begins "
                "and ends: add the lines of docs/start/accelerate.md, and leave out --auto"
            )

    _before(module.Accelerator, "__init__", only_in_a_trainer)


def _other_lightning(module: ModuleType) -> None:
    raise Unsupported(
        "tmd launch --auto knows the package lightning, and this script imports "
        f"{module.__name__}: write 'import lightning.pytorch as pl'"
    )


ADAPTERS: dict[str, Callable[[ModuleType], None]] = {
    "accelerate": _accelerate,
    "transformers": _transformers,
    "peft": _transformers,
    "trl": _trl,
    "lightning.pytorch": _lightning,
    "pytorch_lightning": _other_lightning,
    "torchtitan": _torchtitan,
}
"""Module of a framework -> what replaces its parts."""


def _guard() -> None:
    """Only with an adapter are there process groups and steps: others would be unprotected."""
    make = dist.init_process_group
    refusal = f"tmd launch --auto knows {TRAINERS}, but this script"

    def refuse(*_: object) -> None:
        if attachment.trains:
            attachment.trained = True
            return
        if not attachment.trained:
            raise Unsupported(f"{refusal} calls an optimizer without one: {PAGE}")
        _warn_of_the_rest()

    register_optimizer_step_pre_hook(refuse)

    def init_process_group(backend: Any = None, *args: Any, **named: Any) -> None:
        if backend != "tmd":
            raise Unsupported(f"{refusal} makes its own process group: {PAGE}")
        make(backend, *args, **named)
        attachment.grouped = True

    dist.init_process_group = init_process_group


@functools.cache
def _warn_of_the_rest() -> None:
    # No error: that could cost what was trained and is not saved yet.
    log.warning(
        "the trainer has ended, and this script goes on with an optimizer of its own: tmd does not "
        "protect that part, and its numbers are wrong once a worker is lost"
    )


def _run() -> None:
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Run the script that the arguments name, or the module after ``-m``. Raises Unsupported."""
    sys.argv = sys.argv[1:]
    if not sys.argv:
        raise SystemExit("python -m tmd.integrations.auto: name a script and its arguments")
    for name, attach in ADAPTERS.items():
        wrapt.register_post_import_hook(attach, name)
    _guard()
    try:
        _run()
    except SystemExit as end:
        if end.code is not None:  # 0 is also the end of '--help'
            raise
    if not attachment.grouped:
        raise Unsupported(f"{sys.argv[0]} has ended and did not train with {TRAINERS}: {PAGE}")


if __name__ == "__main__":
    main()
