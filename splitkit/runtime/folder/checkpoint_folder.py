"""The files of a folder of checkpoints: each step's folder is complete or absent, and all are of one run.

::

    run.json                     the run to which the folder belongs, and the process that may write to it
    step-200/checkpoint.json     everything but tensors: options, schedules, positions, random states
    step-200/.metadata           tensors, as torch.distributed.checkpoint writes them
    step-200/__0_0.distcp        the tensors that rank 0 wrote
    step-200/digests.json        the size and checksum of each of these files
    .writing-step-300-5f1c       a step that is being written; the folder is renamed when all of it is on disk

A step that is written a second time becomes ``step-200.1``: a rename cannot replace a folder that has files in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError
from splitkit.plans.plan_file import read_json
from splitkit.runtime.folder.checkpoint_reader import METADATA
from splitkit.units import size

DIGESTS = "digests.json"
_PIECE = 2**20  # bytes that are read at once: they stay in the cache of a core


def digest_of_file(path: Path) -> str:
    """Return the size and the CRC-32 of a file, which is read in pieces of 1 MiB.

    Raises:
        OSError: if it cannot be read.
    """
    size, crc, piece = 0, 0, memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            size, crc = size + count, zlib.crc32(piece[:count], crc)
    return f"{size}-{crc:08x}"


def stored_digests(folder: Path, remedy: str) -> dict[str, str]:
    """Return the name of each file -> its digest when it was written; empty for a folder without digests.

    Raises:
        FileError: SK504 if they cannot be read, SK505 if they are damaged; with this remedy.
    """
    path = folder / DIGESTS
    if not path.is_file():
        return {}
    try:
        found = JsonField(str(path), "", read_json(path))
        if strange := [name for name in found.value if Path(name).name != name]:
            raise found.damaged(f"about files of this folder, as {strange[0]!r:.100} is")
        return {name: digest.text() for name, digest in found.fields()}
    except FileError as error:
        code = "SK504" if error.code == "SK504" else "SK505"
        raise FileError(code, f"{path} is damaged: {error.reason}", remedy) from error


def read_data(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder.

    Raises:
        FileError: SK504 if it cannot be read, SK505 if it is damaged; with this remedy.
    """
    try:
        return read_json(path)
    except FileError as error:
        if error.code == "SK504":
            raise FileError(error.code, error.reason, remedy) from error
        raise FileError("SK505", error.reason, remedy) from error


def require_intact(folder: Path, digests: Mapping[str, str], names: Iterable[str], remedy: str) -> None:
    """Refuse files that differ from what was written.

    Args:
        folder: the folder.
        digests: name of a file -> its digest when it was written.
        names: the files to read, all of which must have a digest.
        remedy: the remedy of the refusal.

    Raises:
        FileError: SK505 for the first file that is missing or differs, SK504 if it cannot be read.
    """
    for name in names:
        wanted = digests.get(name, "none")
        try:
            found = digest_of_file(folder / name)
        except FileNotFoundError as error:
            raise FileError("SK505", f"{folder} is damaged: it has no {name}", remedy, [name]) from error
        except OSError as error:
            raise FileError("SK504", f"cannot read {folder / name}: {error.strerror}", remedy, [name]) from error
        if found != wanted:
            raise FileError(
                "SK505",
                f"{folder / name} is damaged, or a file of another folder: its size and checksum are {found}, and "
                f"{wanted:.40} in {DIGESTS}",
                remedy,
                [name],
            )


# Digests of the files in a folder, which tell damaged files and files of another folder before they are read.
#
# ``digests.json`` has the size and the CRC-32 of each other file::
#
#     {"checkpoint.json": "1893-0c4fe2a1", ".metadata": "6120-77d1a93e", "__0_0.distcp": "1810432-5f1c09ab"}
#
# A CRC-32 finds every flipped bit, and another difference with a probability of 1 - 2^-32; it is no protection against
# forgery. Of Python's hashes it is the fastest: 2.1 GB/s on a core of which SHA-256 takes 0.6 (CPython 3.11).


RUN = "run.json"
RECORD = "checkpoint.json"
RUN_KIND, KIND = "splitkit checkpoints", "splitkit checkpoint"
SCHEMA = 2  # of both records; checkpoints of another schema are refused
_STEP = re.compile(r"step-(\d{1,18})(?:\.(\d{1,9}))?")
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")  # names that torch.distributed.checkpoint gives to the files of a rank
_WRITING, _REMOVED = ".writing-", ".removed-"
_ANOTHER = "Remove it, or name another folder."


@dataclass(frozen=True)
class Run:
    """To which run a folder belongs.

    Attributes:
        id: the run; a run that is resumed keeps it.
        writer: the process group that may write; one that resumes takes its place.
    """

    id: str
    writer: str


def complete_steps(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the step, the number among the writings of this step, and the folder of each checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(place.name), place) for place in folder.iterdir())
    return sorted((int(match[1]), int(match[2] or 0), place) for match, place in found if match is not None)


def require_free(folder: Path, resume: bool) -> None:
    """Refuse a folder with the checkpoints of an earlier run, unless that run is to be resumed.

    Raises:
        FileError: SK512.
    """
    if not resume and (steps := complete_steps(folder)):
        raise FileError(
            "SK512",
            f"{folder} has the checkpoints of an earlier run, up to step {steps[-1][0]}",
            "Continue that run (--resume, or open_checkpoints(..., resume=True)), or name another folder.",
        )


def claim(folder: Path, resume: bool, needed: int = 0) -> tuple[Run, Path | None]:
    """Make a folder, test that it can be written, and make this process its only writer.

    What an interrupted writer left behind is removed.

    Args:
        folder: the folder.
        resume: whether to continue the run of the folder, if it has one.
        needed: the bytes that a checkpoint needs at least.

    Returns:
        The run, and the folder of its last checkpoint, if it has one.

    Raises:
        FileError: SK504 if it cannot be written, SK512 if it is another run's, SK505 for a damaged checkpoint.
    """
    require_free(folder, resume)
    last = steps[-1][2] if (steps := complete_steps(folder)) else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise unwritable(folder, error) from error
    if free < needed:
        raise FileError(
            "SK504",
            f"cannot write checkpoints to {folder}: {size(free)} are free, and one needs at least {size(needed)}",
            "Free some space, or name a folder on another disk.",
        )
    known = _run_of(folder) if resume else None
    if last is not None:
        of_last = read_record(last)["run"].text()
        if known is not None and known.id != of_last:
            raise FileError(
                "SK512",
                f"{last} is of the run {of_last:.40}, and {folder / RUN} names the run {known.id:.40}",
                "Keep the checkpoints of one run in a folder; move the others away, or remove "
                f"{RUN} to continue from {last}.",
            )
        known = Run(of_last, "")
    run = Run(known.id if known is not None else os.urandom(8).hex(), os.urandom(8).hex())
    data = {"schema": SCHEMA, "kind": RUN_KIND, "run": run.id, "writer": run.writer, "started": _now()}
    try:
        for place in folder.iterdir():
            if place.is_dir() and place.name.startswith((_WRITING, _REMOVED)):
                shutil.rmtree(place, ignore_errors=True)
            elif place.name.startswith(_WRITING):
                place.unlink()
        _write_durably(folder / RUN, data)
    except OSError as error:
        raise unwritable(folder, error) from error
    return run, last


def require_own(folder: Path, run: Run) -> None:
    """Refuse to write to a folder that another process has claimed, or that this process does not see.

    Raises:
        FileError: SK504 if its ``run.json`` cannot be read, SK512 if it is another writer's.
    """
    found = _run_of(folder)
    if found is None:
        raise FileError(
            "SK504",
            f"{folder} has no {RUN}, which rank 0 has written to it",
            "Name a folder that all ranks share, and leave it in place.",
        )
    if found != run:
        raise FileError("SK512", f"another process has begun to write to {folder}", "Use one folder for each run.")


def begin(folder: Path, step: int) -> tuple[Path, Path]:
    """Return the folder that a step will have, and the name of a new one in which to write it.

    The former is ``step-7``, or ``step-7.1`` if there is one already.
    """
    again = [number for other, number, _ in complete_steps(folder) if other == step]
    place = folder / (f"step-{step}.{max(again) + 1}" if again else f"step-{step}")
    return place, folder / f"{_WRITING}step-{step}-{os.urandom(4).hex()}"


def commit(draft: Path, place: Path, record: dict[str, Any], digests: Mapping[str, str], run: Run) -> None:
    """Complete a step of which all tensors are written: add its record and its digests, and give it its name.

    Raises:
        OSError: if it cannot be written.
        FileError: SK504, SK512 as `require_own`.
    """
    _write_durably(draft / RECORD, {"schema": SCHEMA, "kind": KIND, "run": run.id, "written": _now(), **record})
    _write_durably(draft / DIGESTS, {**digests, RECORD: digest_of_file(draft / RECORD)})
    _sync(draft)
    require_own(draft.parent, run)
    draft.rename(place)
    _sync(place.parent)


def remove_older(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the last ones, and all but the last writing of each step, as far as possible.

    A folder is renamed before its files are removed, so that it is never half a checkpoint.
    """
    last = {step: place for step, _, place in complete_steps(folder)}
    kept = {last[step] for step in sorted(last)[-keep:]}
    for _, _, place in complete_steps(folder):
        if place not in kept:
            gone = place.with_name(f"{_REMOVED}{place.name}-{os.urandom(4).hex()}")
            with suppress(OSError):
                place.rename(gone)
                shutil.rmtree(gone)


def read_record(place: Path) -> JsonField:
    """Return the record of a checkpoint.

    Raises:
        FileError: SK505 if the record, or the description of the tensors, is damaged; SK503 if its schema is unknown.
    """
    digests = stored_digests(place, _instead_of(place))
    if digests:
        require_intact(place, digests, (RECORD, METADATA), _instead_of(place))
    lost = next((name for name in (RECORD, METADATA) if not (place / name).is_file()), None)
    data = JsonField(str(place / RECORD), "", {} if lost else read_data(place / RECORD, _ANOTHER))
    if not lost and (data["schema"].value != SCHEMA or data["kind"].value != KIND):
        raise FileError(
            "SK503",
            f"{place / RECORD} has the schema {data['schema'].value!r:.40}, not {SCHEMA}",
            "Use the version of splitkit that wrote it, or begin anew in another folder.",
        )
    if lost or not digests:
        raise FileError("SK505", f"{place} is damaged: it has no {lost or DIGESTS}", _instead_of(place))
    return data


def require_undamaged(place: Path, rank: int, ranks: int) -> None:
    """Refuse a checkpoint with a file that differs from what was written. Each rank reads its share of the files.

    Raises:
        FileError: SK505, SK504 as `require_intact`.
    """
    digests = stored_digests(place, _instead_of(place))
    require_intact(place, digests, of_rank(digests, rank, ranks), _instead_of(place))


def of_rank(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the files that a rank reads: what it wrote, divided by rank modulo ``ranks`` if their number changed."""
    found = {name: _WRITER.fullmatch(name) for name in sorted(names)}
    return [name for name, match in found.items() if (int(match[1]) if match else 0) % ranks == rank]


def _instead_of(place: Path) -> str:
    """Return the remedy for a damaged checkpoint."""
    others = [other for _, _, other in complete_steps(place.parent) if other != place]
    if others:
        return f"Remove {place} to resume from {others[-1]}, or copy it again from where it was written."
    return "Copy it again from where it was written, or begin anew in another folder."


def unwritable(folder: Path, error: Exception | str) -> FileError:
    """Return the error SK504 for a folder to which nothing can be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return FileError(
        "SK504",
        f"cannot write checkpoints to {folder}: {reason}",
        "Name a folder that you can write to, or free some space.",
    )


def _run_of(folder: Path) -> Run | None:
    if not (folder / RUN).is_file():
        return None
    data = JsonField(str(folder / RUN), "", read_data(folder / RUN, _ANOTHER))
    if data["kind"].value != RUN_KIND:
        raise data["kind"].damaged(repr(RUN_KIND))
    return Run(data["run"].text(), data["writer"].text())


def _write_durably(path: Path, data: dict[str, Any]) -> None:
    """Write a file that is on the disk before it gets its name."""
    draft = path.with_name(f"{_WRITING}{path.name}-{os.urandom(4).hex()}")
    try:
        draft.write_text(json.dumps(data) + "\n", encoding="utf-8")
        _sync(draft)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Have the operating system write a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
