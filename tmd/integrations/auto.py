"""Runs a training script unchanged: its framework gets the adapter when it is imported.

``tmd launch --auto script.py`` starts ``python -m tmd.integrations.auto script.py``. It knows the
frameworks whose adapter needs no line in the script: the ``Trainer`` of transformers and that of
Lightning. Whatever else a script trains with is refused with the reason, before its first step.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

KNOWN = "tmd launch --auto knows the Trainer of transformers and of Lightning, but this script"
PAGE = "see docs/start/porting.md for the lines that it needs"


class Unsupported(RuntimeError):
    """The script trains in a way that cannot be protected without a change."""


class OnImport(MetaPathFinder):
    """Calls a function with each of some modules, once it has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._searching or name not in self._actions:
            return None
        self._searching = True  # the other finders are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            self._after(spec.loader, name)
        return spec

    def _after(self, loader: Loader, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if action := self._actions.pop(name, None):
                action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _transformers(_: ModuleType) -> None:
    from tmd.integrations import transformers as ours

    module: Any = sys.modules["transformers"]  # its import may put another one in its place
    original = module.Trainer
    train = original.train

    def only_ours(self: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(self, ours.Trainer) or _is_foreign(type(self), ours.Trainer):
            raise Unsupported(f"tmd launch --auto does not know {type(self).__name__}: {PAGE}")
        return train(self, *args, **named)

    original.train = only_ours
    module.Trainer, module.TrainingArguments = ours.Trainer, ours.TrainingArguments


def _is_foreign(kind: type, ours: type) -> bool:
    """Whether an installed package builds on our class, with a state of its own."""
    above = kind.__mro__[: kind.__mro__.index(ours)]
    files = (getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in above)
    return any("site-packages" in file for file in files)


def _lightning(module: Any) -> None:
    from tmd.integrations.lightning import TmdStrategy

    trainer = module.Trainer
    make = trainer.__init__

    def with_strategy(self: Any, *args: Any, **named: Any) -> None:
        asked = named.get("strategy", "auto")
        if isinstance(asked, str) and asked in ("auto", "ddp"):
            named["strategy"] = TmdStrategy()
        elif not isinstance(asked, TmdStrategy):
            raise Unsupported(
                f"tmd launch --auto does not know Trainer(strategy={asked!r}): give 'ddp'"
            )
        make(self, *args, **named)

    trainer.__init__ = with_strategy


def _other_lightning(module: ModuleType) -> None:
    raise Unsupported(
        "tmd launch --auto knows the package lightning, and this script imports "
        f"{module.__name__}: write 'import lightning.pytorch as pl'"
    )


ADAPTERS: dict[str, Callable[[ModuleType], None]] = {
    "transformers": _transformers,
    "lightning.pytorch": _lightning,
    "pytorch_lightning": _other_lightning,
}
"""Module of a framework -> what replaces its parts."""


def _guard() -> list[str]:
    """Only with an adapter are there process groups and steps: others would be unprotected.

    Returns a list to which each group of an adapter is added.
    """
    make = dist.init_process_group
    made: list[str] = []

    def refuse(*_: object) -> None:
        if not made:
            raise Unsupported(f"{KNOWN} calls an optimizer without either: {PAGE}")

    register_optimizer_step_pre_hook(refuse)

    def init_process_group(backend: Any = None, *args: Any, **named: Any) -> None:
        if backend != "tmd":
            raise Unsupported(f"{KNOWN} makes its own process group: {PAGE}")
        make(backend, *args, **named)
        made.append("tmd")

    dist.init_process_group = init_process_group
    return made


def main() -> None:
    """Run the script that the arguments name. Raises Unsupported."""
    sys.argv = sys.argv[1:]
    if not sys.argv:
        raise SystemExit("python -m tmd.integrations.auto: name a script and its arguments")
    sys.meta_path.insert(0, OnImport(dict(ADAPTERS)))
    made = _guard()
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    if not made:
        raise Unsupported(
            f"{sys.argv[0]} has ended and trained with no Trainer of transformers or Lightning: "
            f"{PAGE}"
        )


if __name__ == "__main__":
    main()
