"""Checkpoints on disk, in the format of ``torch.distributed.checkpoint``.

This module starts no threads and sends no messages. Each rank writes its part as a small
checkpoint. The parts are joined by merging their metadata. A folder gets its final name once all
data is on disk; an incomplete one, after a loss, a full disk or the end of the job, has another
name.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import EEXIST, EISDIR, ENOTEMPTY
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from msgspec import MsgspecError, Struct, json, structs
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from tmd.core.values.checkpoints import GONE, PARTIAL, name_of, step_of
from tmd.core.values.errors import StateMismatch
from tmd.core.values.reasons import in_words
from tmd.trainer.checkpoints import disk
from tmd.trainer.checkpoints.naming import Path as Name
from tmd.trainer.checkpoints.naming import dotted
from tmd.trainer.checkpoints.placing import SavedNames, without_prefix
from tmd.trainer.checkpoints.staging import StagedState
from tmd.trainer.state.data import Position

SEAL = "tmd.json"
METADATA = ".metadata"
NEW = ".new"
WRITING = ".writing"
PART = "part-"
ABSENT = "it is not there"
"""The flaw of a checkpoint that this rank cannot see."""
DAMAGE = disk.NOT_THERE | {EISDIR}
"""Errors that mean that a file is damaged. Any other error is raised, since it may be temporary, as
when a file server is away."""


class CheckpointSeal(Struct, frozen=True):
    """Metadata of a complete checkpoint, or of a part; written last."""

    step: int
    position: Position
    size: int
    """Number of ranks of the job."""
    files: dict[str, tuple[int, str]]
    """Size and digest of each file."""
    digest: str = ""
    """Digest of all other fields; empty in a checkpoint of tmd 0.1.0."""
    run: str = ""
    """The run that wrote it. Empty if unknown: in a checkpoint of tmd 0.1.0, and in the part of a
    worker that was a standby at the start."""


class _Planner(DefaultSavePlanner):
    """Plans by the live tensors, which know their slice of the whole; writes the copies."""

    def __init__(self, copies: Mapping[str, Any]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._copies[index.fqn]


def new_run() -> str:
    """The id of a run that begins now. Parts of two runs are not joined: a worker of the former one
    may still be writing. Of two ids the later one is greater, unless a clock was set back."""
    return f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"


def write_part(folder: Path, staged: StagedState, size: int, run: str = "") -> None:
    """Write the copied state of one rank, completely or not at all.

    Raises:
        OSError: the disk is full or gone.
        StateMismatch: the state may have changed while it was copied, or a later run of the job
            has written this part.
    """
    place = _unfinished(folder, staged.step) / f"{PART}{staged.rank}"
    place.parent.mkdir(parents=True, exist_ok=True)
    # The rank's former worker may still write. In a shared folder, one could seal files that the
    # other is still writing, or has half removed.
    own = f"{place.name}.{uuid.uuid4().hex[:8]}"
    for left in _entries_of(place.parent, place.name, NEW):
        with suppress(OSError):
            shutil.rmtree(left.rename(left.with_name(f"{left.name}.{own}{GONE}")))
    new = place.with_name(own + NEW)
    try:
        new.mkdir()
        with disk.marked(place.with_name(own + WRITING)):
            _write(new, staged)
            _seal(new, CheckpointSeal(staged.step, staged.position, size, _digests(new), run=run))
            staged.confirm()
            _give_name(new, place, run)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _entries_of(folder: Path, part: str, suffix: str = "") -> list[Path]:
    """Temporary files and folders of ``part`` whose names end in ``suffix``; the folder of parts
    need not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = (name for name in os.listdir(folder) if name.startswith(f"{part}."))
        return [folder / name for name in names if name.endswith(suffix)]
    return []


def _give_name(new: Path, place: Path, run: str) -> None:
    if disk.exists(place):
        there = _read_seal(place).run
        if _of_one_run({run, there}):
            # A repeated step gives the same bits.
            shutil.rmtree(new)
            return
        if run < there:
            raise StateMismatch("a later run of the job writes into the folder")
        shutil.rmtree(place)
    try:
        new.rename(place)
    except OSError as error:
        if error.errno not in {EEXIST, ENOTEMPTY}:
            raise
        _give_name(new, place, run)  # another worker of the rank was faster
    else:
        disk.sync(place.parent)


def _of_one_run(runs: set[str]) -> bool:
    return len(runs - {""}) <= 1


def _write(place: Path, staged: StagedState) -> None:
    copied = DefaultSavePlanner()
    copied.set_up_planner(_nested(staged.copies), None, is_coordinator=True)
    planner = _Planner(copied.state_dict)
    planner.set_up_planner(_nested(staged.live), None, is_coordinator=True)
    [plan], metadata = create_default_global_save_plan([planner.create_local_plan()])
    metadata.planner_data = planner.mappings
    writer = FileSystemWriter(place)
    writer.set_up_storage_writer(is_coordinator=True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def parts_missing(folder: Path, step: int, size: int) -> list[int]:
    """Ranks that have not yet written their part."""
    place = _unfinished(folder, step)
    return [rank for rank in range(size) if not disk.exists(place / f"{PART}{rank}")]


def being_written(folder: Path, step: int, ranks: Iterable[int]) -> bool:
    """Whether the part of one of ``ranks`` is being written, as far as the file system can tell.

    The lock of a host that is lost may remain for long. It is outdated if there is a part of its
    rank, by another worker, for a later step.
    """
    place = _unfinished(folder, step)
    later = [folder / name for name in os.listdir(folder) if (step_of(name, PARTIAL) or 0) > step]

    def is_written(part: str) -> bool:
        return any(map(disk.is_locked, _entries_of(place, part, WRITING))) and not any(
            disk.exists(each / part) or _entries_of(each, part, NEW) for each in later
        )

    return any(is_written(f"{PART}{rank}") for rank in ranks)


def is_complete(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint of ``step``."""
    return disk.exists(folder / name_of(step))


def join_parts(folder: Path, step: int, size: int) -> None:
    """Join the parts of all ranks into one checkpoint, and give it its final name.

    Raises:
        BlockingIOError: another worker joins them.
        OSError: the disk is full or gone.
        StateMismatch: the parts do not fit together.
    """
    place = _unfinished(folder, step)
    with disk.locked(place / f"{PART}0" / SEAL):
        _join(folder, place, step, size)


def _join(folder: Path, place: Path, step: int, size: int) -> None:
    seals = {f"{PART}{r}": _read_seal(place / f"{PART}{r}") for r in range(size)}
    if any((seal.step, seal.size) != (step, size) for seal in seals.values()):
        raise StateMismatch("the parts belong to different jobs")
    if not _of_one_run({seal.run for seal in seals.values()}):
        raise StateMismatch("the parts belong to different runs of the job")
    merged = Metadata({}, planner_data={})
    results: list[WriteResult] = []
    for name in seals:
        own = FileSystemReader(place / name).read_metadata()
        _merge(merged, own)
        needed = {stored.relative_path for stored in own.storage_data.values()}
        if lacking := needed - seals[name].files.keys():
            raise StateMismatch(f"{name} lacks {', '.join(sorted(lacking))}")
        results += [
            WriteResult(i, s.length, replace(s, relative_path=f"{name}/{s.relative_path}"))
            for i, s in own.storage_data.items()
        ]
    for fqn, found in merged.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            continue
        if sum(prod(chunk.sizes) for chunk in found.chunks) != prod(found.size):
            raise StateMismatch(f"the parts do not add up to the whole of {fqn}")
    FileSystemWriter(place).finish(*_renamed(merged, results))
    files = {f"{n}/{f}": found for n, seal in seals.items() for f, found in seal.files.items()}
    files[METADATA] = disk.digest(place / METADATA)
    _seal(place, CheckpointSeal(step, seals[f"{PART}0"].position, size, files))
    for left in (left for name in seals for left in _entries_of(place, name)):
        if left.suffix == WRITING:
            left.unlink(missing_ok=True)
        else:
            shutil.rmtree(left, ignore_errors=True)
    place.rename(folder / name_of(step))
    disk.sync(folder)


def _merge(merged: Metadata, own: Metadata) -> None:
    merged.planner_data |= own.planner_data
    for fqn, found in own.state_dict_metadata.items():
        known = merged.state_dict_metadata.setdefault(fqn, found)
        if known is found or not isinstance(found, TensorStorageMetadata):
            continue
        if not isinstance(known, TensorStorageMetadata) or known.size != found.size:
            raise StateMismatch(f"the parts do not agree on {fqn}")
        offsets = {chunk.offsets for chunk in known.chunks}
        known.chunks += [chunk for chunk in found.chunks if chunk.offsets not in offsets]


def _renamed(
    merged: Metadata, results: Sequence[WriteResult]
) -> tuple[Metadata, list[list[WriteResult]]]:
    """The same parts, with the names that tensors have in the whole."""
    tensors = {f: p for f, p in merged.planner_data.items() if _is_tensor(merged, f)}
    paths = {**merged.planner_data, **without_prefix(tensors)}
    new = {f: dotted(p) if p != merged.planner_data[f] else f for f, p in paths.items()}
    return (
        Metadata(
            {new[f]: found for f, found in merged.state_dict_metadata.items()},
            planner_data={new[f]: path for f, path in paths.items()},
        ),
        [[replace(r, index=replace(r.index, fqn=new[r.index.fqn])) for r in results]],
    )


def _is_tensor(metadata: Metadata, fqn: str) -> bool:
    return isinstance(metadata.state_dict_metadata[fqn], TensorStorageMetadata)


def flaw(folder: Path, step: int, share: int = 0, shares: int = 1) -> str:
    """Why a checkpoint is damaged; an empty string if it is not. Reads only every ``shares``-th
    file, from number ``share`` on.

    Raises:
        OSError: this process cannot read a file now, which may be whole.
    """
    place = folder / name_of(step)
    if not disk.exists(place):
        # A client of NFS may remember its absence for a minute. A listing asks the server.
        with suppress(FileNotFoundError, NotADirectoryError):
            os.listdir(folder)
        if not disk.exists(place):
            return ABSENT
    name = SEAL
    try:
        written = (place / SEAL).read_bytes()
        seal = _decoded(written)
        if seal.digest not in ("", _digest_of(written)):
            return f"{SEAL} differs from what was written"
        for name in sorted(seal.files)[share::shares]:
            if not disk.exists(place / name):
                return f"{name} is missing"
            if disk.digest(place / name) != seal.files[name]:
                return f"{name} differs from what was written"
    except (OSError, MsgspecError) as error:
        if isinstance(error, OSError) and error.errno not in DAMAGE:
            raise
        return f"{name} cannot be read: {in_words(error)}"
    return ""


class CheckpointReader:
    """Reads one complete checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / name_of(step)
        self.seal = _read_seal(self.path)
        self._reader = FileSystemReader(self.path)
        self._metadata = self._reader.read_metadata()
        paths = self._metadata.planner_data.items()
        self.saved = SavedNames(
            tuple(map(str, p)) for f, p in paths if _is_tensor(self._metadata, f)
        )
        self._parts = {
            index.fqn: int(info.relative_path.partition("/")[0].removeprefix(PART))
            for index, info in self._metadata.storage_data.items()
        }

    def writer(self, name: Name) -> int:
        """A rank that has written part of a tensor. Raises StateMismatch."""
        self.described(name)
        return self._parts[dotted(name)]

    def described(self, name: Name) -> TensorStorageMetadata:
        """Size and type of a tensor. Raises StateMismatch."""
        found = self._metadata.state_dict_metadata.get(dotted(name))
        if not isinstance(found, TensorStorageMetadata):
            raise StateMismatch(f"{self.path} has no tensor {dotted(name)}")
        return found

    def into(self, targets: Mapping[Name, Tensor]) -> None:
        """Read tensors in place; of a distributed tensor this rank's part.

        Raises:
            StateMismatch: one is missing, or has another size or dtype.
        """
        for name, target in targets.items():
            found = self.described(name)
            there = _kind(found.properties.dtype, found.size)
            here = _kind(target.dtype, target.shape)
            if there != here:
                raise StateMismatch(f"{dotted(name)} is {there} in {self.path}, {here} here")
        planner = DefaultLoadPlanner()
        wanted = {dotted(name): target.detach() for name, target in targets.items()}
        planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()


def _unfinished(folder: Path, step: int) -> Path:
    return folder / (name_of(step) + PARTIAL)


def _nested(flat: Mapping[Name, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree


def _kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _digests(place: Path) -> dict[str, tuple[int, str]]:
    return {file.name: disk.digest(file) for file in sorted(place.iterdir())}


def _seal(place: Path, seal: CheckpointSeal) -> None:
    with (place / SEAL).open("wb") as stream:
        undigested = json.encode(structs.replace(seal, digest=""))
        stream.write(json.encode(structs.replace(seal, digest=_digest_of(undigested))))
        stream.flush()
        os.fsync(stream.fileno())
    disk.sync(place)


def _read_seal(place: Path) -> CheckpointSeal:
    return _decoded((place / SEAL).read_bytes())


def _decoded(written: bytes) -> CheckpointSeal:
    return json.decode(written, type=CheckpointSeal)


def _digest_of(written: bytes) -> str:
    """Digest of a seal as it was written: another release may know more or fewer fields."""
    fields = json.decode(written, type=dict[str, Any])
    return xxhash.xxh3_128_hexdigest(json.encode({**fields, "digest": ""}))
