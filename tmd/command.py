"""The command of a worker, and the reasons why it cannot be started.

A missing script fails on every attempt, so it is refused before the first one.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import os_reason
from tmd.extras import lacking

LONG = "--check-hash-based-pycs"
"""The only long option of the interpreter before a script; it also takes the next argument."""
PLAIN = frozenset("bBdEiIOPqRsSuvx")
"""Short options of the interpreter that may stand together in one argument, as in ``-um``."""
WITH_VALUE = frozenset("cmWX")
"""Options that take the rest of their argument or, if that is empty, the next one."""


def command_of(script: Sequence[str]) -> tuple[str, ...]:
    """The executed command: a Python file and ``-m MODULE`` go to the interpreter of ``tmd``."""
    if script[0] == "-m" or script[0].endswith(".py"):
        return (sys.executable, *script)
    return tuple(script)


def attached(script: Sequence[str]) -> tuple[str, ...]:
    """``script`` as :mod:`tmd.integrations.auto` runs it.

    Raises:
        ConfigError: it is neither a Python file nor ``-m MODULE``, or it is not there.
    """
    if script[0] == "-m":
        why = _missing_module(script[1] if len(script) > 1 else "")
    elif script[0].endswith(".py"):
        why = _unreadable(Path(script[0]))
    else:
        why = f"{script[0]} is neither a Python file nor -m MODULE: name train.py, say"
    if why:
        raise ConfigError(f"--auto: {why}")
    return ("-m", "tmd.integrations.auto", *script)


def missing(command: Sequence[str]) -> str:
    """Why ``command`` cannot be started, with the remedy; empty if no reason is known."""
    program = command[0]
    if found := shutil.which(program):
        if not _is_python(found):
            return ""
        reason = lacking("trainer") if _is_ours(found) else ""
        return _missing_script(found, command[1:]) or reason
    if os.sep not in program:
        return f"there is no program {program} in PATH: name a Python file, -m MODULE or a program"
    return _unreadable(Path(program)) or f"{program} is not executable: run chmod +x {program}"


def _is_python(program: str) -> bool:
    return re.fullmatch(r"python(\d+(\.\d+)?t?)?", Path(program).name) is not None


def _missing_script(python: str, arguments: Sequence[str]) -> str:
    """Why the interpreter cannot run its arguments; only a file and ``-m`` are checked."""
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-", ""):
            return ""
        if argument == "--" or not argument.startswith("-"):
            script = next(rest, "") if argument == "--" else argument
            return _unreadable(Path(script), may_be_folder=True) if script else ""
        if argument == LONG:
            next(rest, "")
            continue
        letters = argument[1:].lstrip("".join(PLAIN))
        if not letters:
            continue
        if letters[0] not in WITH_VALUE:
            return ""  # an unknown option may take the next argument
        value = letters[1:] or next(rest, "")
        if letters[0] == "m":
            return _missing_module(value) if _is_ours(python) else ""
        if letters[0] == "c":
            return ""
    return f"{python} is given nothing to run: name a Python file or -m MODULE"


def _is_ours(python: str) -> bool:
    """Whether it is this interpreter: only an environment's own one knows its modules."""
    return Path(python).absolute() == Path(sys.executable).absolute()


def _unreadable(file: Path, *, may_be_folder: bool = False) -> str:
    shown = f"{file} (in {Path.cwd()})" if not file.is_absolute() else str(file)
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no file {shown}: check the path, on this host"
    except OSError as error:
        return f"{shown} cannot be read: {os_reason(error)}"
    if may_be_folder and (file / "__main__.py").is_file():
        return ""
    if file.is_dir():
        return f"{shown} is a folder: name the Python file in it"
    if not os.access(file, os.R_OK):
        return f"{shown} cannot be read by this user: check its permissions"
    return ""


def _missing_module(module: str) -> str:
    """Searches without an import, since importing a package may have effects."""
    names = module.split(".")
    if not all(names):
        return f"-m is given {module or 'nothing'}: name a module, as -m package.module"
    try:
        return _not_found(names)
    except Exception:
        # A foreign finder may raise anything. The error is left to Python.
        return ""


def _not_found(names: Sequence[str]) -> str:
    module = ".".join(names)
    parent: ModuleSpec | None = None
    for count, name in enumerate(names, start=1):
        spec = _spec(".".join(names[:count]), parent)
        if spec is None:
            if parent is not None and _may_extend(parent):
                return ""
            where = f"in {parent.name}" if parent else "in the Python path"
            return f"there is no module {name} {where}: check -m {module}, on this host"
        if spec.submodule_search_locations is None and count < len(names):
            if _may_extend(spec):
                return ""
            return f"{spec.name} is a module, not a package: check -m {module}"
        parent = spec
    assert parent is not None
    is_package = parent.submodule_search_locations is not None
    if is_package and _spec(f"{module}.__main__", parent) is None and not _may_extend(parent):
        return f"{module} is a package without a __main__.py: name a module in it"
    return ""


def _spec(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    """As ``python -m`` finds it: the working directory comes first.

    Every finder is asked, since editable installations have special ones.
    """
    if parent is None:
        if found := PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]):
            return found
        path = None
    else:
        path = [*(parent.submodule_search_locations or ())]
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _may_extend(package: ModuleSpec) -> bool:
    """Whether its code, which is not run here, may add folders with modules."""
    if package.origin is None:
        return False  # a namespace package has no code
    source = getattr(package.loader, "get_source", lambda _: None)(package.name)
    return source is None or "__path__" in source
