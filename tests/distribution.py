"""A distribution with one plug-in, as somebody else's package would bring it."""

from __future__ import annotations

from pathlib import Path


def distribution(folder: Path, name: str, group: str, text: str) -> None:
    """Put the module ``name`` with ``text`` into ``folder``, and its entry point in ``group``: the
    class of that name, capitalized. For processes with ``folder`` in ``PYTHONPATH``."""
    (folder / f"{name}.py").write_text(text)
    facts = folder / f"{name}-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{name.capitalize()}\n")
