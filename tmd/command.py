"""The command of a worker, and why it cannot be started.

A script that is not there fails on every try. It is refused before the first one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tmd.extras import lacking_trainer

WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take the next argument, too."""


def command_of(script: Sequence[str]) -> tuple[str, ...]:
    """What is executed: a Python file and ``-m MODULE`` go to the interpreter of ``tmd``."""
    if script[0] == "-m" or script[0].endswith(".py"):
        return (sys.executable, *script)
    return tuple(script)


def missing(command: Sequence[str]) -> str:
    """Why ``command`` cannot be started, with the remedy; empty if nothing speaks against it."""
    program = command[0]
    if found := shutil.which(program):
        if not _is_python(found):
            return ""
        lacking = lacking_trainer() if _is_ours(found) else ""
        return _missing_script(found, command[1:]) or lacking
    if os.sep not in program:
        return f"there is no program {program} in PATH: name a Python file, -m MODULE or a program"
    return _unreadable(Path(program)) or f"{program} is not executable: run chmod +x {program}"


def _is_python(program: str) -> bool:
    return Path(program).name.startswith("python")


def _missing_script(python: str, arguments: Sequence[str]) -> str:
    """Of what the interpreter is asked to run; of other ways than a file and ``-m`` nothing."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-m":
            module = next(rest, "")
            return _missing_module(module) if _is_ours(python) else ""
        if argument in WITH_VALUE:
            next(rest, "")
        elif not argument.startswith("-"):
            return _unreadable(Path(argument), may_be_folder=True)
        elif argument == "-" or argument.startswith("-c"):
            return ""
    return f"{python} is given nothing to run: name a Python file or -m MODULE"


def _is_ours(python: str) -> bool:
    """What modules another environment has only its own interpreter knows."""
    return Path(python).absolute() == Path(sys.executable).absolute()


def _unreadable(file: Path, *, may_be_folder: bool = False) -> str:
    shown = f"{file} (in {Path.cwd()})" if not file.is_absolute() else str(file)
    if not file.exists():
        return f"there is no file {shown}: check the path, on this host"
    if may_be_folder and (file / "__main__.py").is_file():
        return ""
    if file.is_dir():
        return f"{shown} is a folder: name the Python file in it"
    if not os.access(file, os.R_OK):
        return f"{shown} cannot be read by this user: check its permissions"
    return ""


def _missing_module(module: str) -> str:
    """Looked up without importing anything: a package may do much when it is imported."""
    if not all(module.split(".")):
        return f"-m is given {module or 'nothing'}: name a module, as -m package.module"
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    names = module.split(".")
    for count, name in enumerate(names, start=1):
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            if count == 1 and name in sys.builtin_module_names:
                return ""
            where = f"in {'.'.join(names[: count - 1])}" if count > 1 else "in the Python path"
            return f"there is no module {name} {where}: check -m {module}, on this host"
        path = (
            None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
        )
        if path is None and count < len(names):
            return f"{'.'.join(names[:count])} is a module, not a package: check -m {module}"
    if path is not None and PathFinder.find_spec("__main__", path) is None:
        return f"{module} is a package without a __main__.py: name a module in it"
    return ""
