"""Digests of the files in a folder, which tell damaged files and files of another folder before they are read.

``digests.json`` has the size and the CRC-32 of each other file::

    {"checkpoint.json": "1893-0c4fe2a1", ".metadata": "6120-77d1a93e", "__0_0.distcp": "1810432-5f1c09ab"}

A CRC-32 finds every flipped bit, and another difference with a probability of 1 - 2^-32; it is no protection against
forgery. Of Python's hashes it is the fastest: 2.1 GB/s on a core of which SHA-256 takes 0.6 (CPython 3.11).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from splitkit.engine.serialization.json_fields import JsonField
from splitkit.errors import FileError
from splitkit.plans.plan_file import read_json

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
