"""Finds the stateful objects inside a framework's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd.torch_private.modules import saves_more
from tmd.trainer.state.optimizer_state import params_of

INNER = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "OptimizersContainer": "optimizers",
    "LRSchedulersContainer": "schedulers",
}
"""Class of Accelerate or torchtitan -> attribute with the optimizers or schedulers that it wraps.
``AcceleratedOptimizer`` never calls ``torch.optim.Optimizer.__init__``, so it has no hooks."""
CHAIN = "chained_optimizers"
"""Attribute of Megatron's ``ChainedOptimizer`` with the optimizers that it calls in turn."""
PARTS_OF_A_STEP = ("prepare_grads", "step_with_ready_grads")
"""Methods that all optimizers of Megatron have and those of torch lack."""


def expanded(objects: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """What keeps the state: members of lists by number, what frameworks wrap, and the scalers that
    Accelerate's optimizers use."""
    found = list(_members(objects, _inner))
    yield from found
    known = {id(value) for _, value in found}
    for name, value in found:
        _refuse_hidden_scalers(name, value, known)
    for name, scaler in _members(objects, _scaler):
        if id(scaler) not in known:
            known.add(id(scaler))
            yield f"{name}.scaler", scaler


def scalers_of(value: object) -> list[torch.amp.GradScaler]:
    """``value`` if it is a scaler, else those in its attributes, as timm and others keep theirs."""
    if isinstance(value, torch.amp.GradScaler):
        return [value]
    held = getattr(value, "__dict__", {}).values()
    return [each for each in held if isinstance(each, torch.amp.GradScaler)]


def _refuse_hidden_scalers(name: str, value: Any, known: set[int]) -> None:
    """Raises TypeError: a scaler in ``value`` is neither registered nor part of its state."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return
    for scaler in scalers_of(value):
        hidden = id(scaler) not in known and scaler.is_enabled()
        if hidden and not _holds(value.state_dict(), scaler.state_dict()):
            raise TypeError(
                f"register({name}=...): the state of the GradScaler in the {type(value).__name__} "
                "is not in its state_dict(): register the scaler, too, as in register(scaler=...)"
            )


def _holds(state: Any, wanted: dict[str, Any]) -> bool:
    """Whether ``state`` is, or has inside, all entries of ``wanted``."""
    if not isinstance(state, dict):
        return False
    return wanted.items() <= state.items() or any(_holds(each, wanted) for each in state.values())


def _members(
    objects: Mapping[str, object], inner: Callable[[str, Any], Any]
) -> Iterator[tuple[str, object]]:
    for name, value in objects.items():
        found = value if isinstance(value, list | tuple) else inner(name, value)
        if isinstance(found, list | tuple):
            yield from _members({f"{name}[{i}]": item for i, item in enumerate(found)}, inner)
        elif found is not None:
            yield name, found


def _scaler(_: str, value: Any) -> Any:
    scaler = getattr(value, "scaler", None)
    accelerated = any(kind.__name__ == "AcceleratedOptimizer" for kind in type(value).__mro__)
    return scaler if accelerated else None


def _inner(name: str, value: Any) -> Any:
    if isinstance(getattr(value, CHAIN, None), list | tuple) or _is_megatron(value):
        return list(_of_megatron(name, value))
    for kind in type(value).__mro__:
        if kind.__name__ in INNER and not kind.__module__.startswith("torch."):
            return getattr(value, INNER[kind.__name__])
    return value


def _is_megatron(value: object) -> bool:
    return all(callable(getattr(value, each, None)) for each in PARTS_OF_A_STEP)


def _of_megatron(name: str, value: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that one of Megatron runs.

    Raises:
        TypeError: a state outside of them would stay behind, or there are none.
    """
    found = [each for each in _links(value) if each is not None]
    if not found:
        raise TypeError(
            f"register({name}=...): {type(value).__name__} has no optimizer on this rank, so that "
            "no step would vote: give each rank a parameter that is trained"
        )
    kinds = {kind.__name__ for each in (value, *found) for kind in type(each).__mro__}
    divided = sorted(kind for kind in kinds if kind.endswith("DistributedOptimizer"))
    if divided:
        raise TypeError(
            f"register({name}=...): {divided[0]} divides its state among ranks and gathers the "
            "parameters after the vote: leave out use_distributed_optimizer, or the layer-wise one"
        )
    for each in found:
        yield _of_link(name, each)


def _links(value: Any) -> Iterator[Any]:
    """The optimizers at the ends of nested chains; ``None`` for one without parameters here."""
    chained = getattr(value, CHAIN, None)
    if chained is not None:
        for each in chained:
            yield from _links(each)
    else:
        # A rank whose parameters are all frozen, or belong to others, has a wrapper of nothing.
        yield None if getattr(value, "optimizer", value) is None else value


def _of_link(name: str, value: Any) -> torch.optim.Optimizer:
    if isinstance(value, torch.optim.Optimizer):
        return value
    inner, kind = getattr(value, "optimizer", None), type(value).__name__
    if not _is_megatron(value) or not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"register({name}=...): {kind} in {CHAIN} is neither an optimizer of torch nor one of "
            "Megatron around one: name the optimizers of torch that it runs"
        )
    if getattr(value, "grad_scaler", None) is not None or any(
        getattr(value, "fp32_from_float16_groups", ())
    ):
        raise TypeError(
            f"register({name}=...): {kind} keeps a loss scale, or 32-bit weights from which it "
            "writes the model after each step, where no shadow can follow: train in 32 bits "
            "(neither --fp16 nor --bf16), or in torch.autocast with optimizers of torch"
        )
    return inner


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the script built."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def refuse_hidden_in_module(name: str, module: nn.Module) -> None:
    """Refuse state that is neither parameter nor buffer: it would silently stay behind."""
    for path, each in module.named_modules():
        overridden = type(each).get_extra_state is not nn.Module.get_extra_state
        if overridden and each.get_extra_state() is not None:
            raise TypeError(
                f"register({name}=...): {type(each).__name__} at {path or 'the top'} has extra "
                "state (get_extra_state), which cannot move: keep it in buffers"
            )
        if more := saves_more(each):
            raise TypeError(
                f"register({name}=...): {type(each).__name__} at {path or 'the top'} saves "
                f"{', '.join(more)} by _save_to_state_dict, which cannot move: keep it in buffers"
            )


def refuse_hidden_in_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps more than the state and the groups that all have.

    Raises:
        TypeError: the rest would silently stay behind.
    """
    kind, params = type(optimizer).__name__, set(map(id, params_of(optimizer)))
    for attribute, inner in vars(optimizer).items():
        if not isinstance(inner, torch.optim.Optimizer) or inner.state is optimizer.state:
            continue
        if not params.isdisjoint(map(id, params_of(inner))):
            raise TypeError(
                f"register({name}=...): {kind} wraps another optimizer ({attribute}), whose state "
                f"would stay behind: register that one, and put what else {kind} keeps into a "
                "registered object"
            )
    if more := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise TypeError(
            f"register({name}=...): {kind}.state_dict() has {', '.join(more)} besides "
            "'state' and 'param_groups', which would stay behind: keep it there, put it into a "
            "registered object, or leave it out in a subclass"
        )


class Counter:
    """A plain value of the script that moves with the rank. Made by ``session.counter``."""

    def __init__(self, value: Any) -> None:
        self._value = None
        self.value = value

    @property
    def value(self) -> Any:
        """A number, a text, a tensor, or a list or dictionary of these."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        """Raises TypeError: it cannot be sent to another worker."""
        if type(value).__module__ == "numpy" and not isinstance(value, float | str):
            raise TypeError(
                f"session.counter(): {type(value).__name__} of numpy cannot be sent to another "
                "worker: assign float(...), int(...) or a tensor"
            )
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                "session.counter(): the tensor belongs to a graph of autograd: assign its detach()"
            )
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
