"""Files that are written whole or not at all; devices, pipes and links are written to, never replaced."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from secrets import token_hex

from splitkit.errors import FileError

PathLike = str | os.PathLike[str]


def write(path: PathLike, text: str) -> None:
    """Write a text file.

    A regular file is either whole or as it was, and keeps its permissions; a link stays a link, to a file that is
    written so. What is no regular file (a device, a pipe, ``/dev/stdout``) is written to.

    Raises:
        OSError: it cannot be written.
    """
    number = descriptor(path)
    found = None if number is not None else _found(path)
    if number is not None:
        with os.fdopen(os.dup(number), "w", encoding="utf-8") as file:
            file.write(text)
    elif found is not None and not stat.S_ISREG(found.st_mode):
        _write_into(Path(path), text)
    else:
        _write_whole(Path(os.path.realpath(path)), found, text)


def _write_into(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)


def _write_whole(target: Path, found: os.stat_result | None, text: str) -> None:
    if found is not None and not os.access(target, os.W_OK):  # a rename would not ask
        raise _error(errno.EACCES, target)
    if found is not None and not os.access(target.parent, os.W_OK | os.X_OK):
        _write_into(target, text)
        return
    draft = target.with_name(f".splitkit-{token_hex(8)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        if found is not None:
            draft.chmod(stat.S_IMODE(found.st_mode))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def require_writable(path: PathLike) -> None:
    """Raise the ``OSError`` that `write` would meet, as far as it can be known beforehand; nothing is changed."""
    number = descriptor(path)
    if number is not None:
        os.fstat(number)
        return
    found = _found(path)
    if found is not None and not os.access(path, os.W_OK):
        raise _error(errno.EACCES, path)
    if found is None:
        require_room(Path(os.path.realpath(path)).parent)


def require_room(folder: Path) -> None:
    """Raise ``OSError`` if no file can be made in a folder."""
    with tempfile.TemporaryFile(dir=folder):  # a file without a name, where the system has such
        pass


def descriptor(path: PathLike) -> int | None:
    """The number of the file that this process has open and that a path names, as ``/dev/stdout`` names 1.

    To open such a path would begin the file anew: what was printed into it is lost.
    """
    place = Path(path).absolute()
    open_files = {os.path.realpath("/dev/fd"), os.path.realpath("/proc/self/fd")}
    for _ in range(40):  # as many links as Linux follows
        if place.name.isdigit() and os.path.realpath(place.parent) in open_files:
            return int(place.name)
        if not place.is_symlink():
            return None
        place = place.parent / place.readlink()
    return None


def _found(path: PathLike) -> os.stat_result | None:
    """What is there now; ``None`` for nothing. Raises ``OSError`` for what cannot be a file."""
    text = os.fspath(path)
    if not text:
        raise _error(errno.ENOENT, path)
    try:
        found = Path(text).stat()
    except FileNotFoundError:
        if text.endswith(os.sep):
            raise _error(errno.EISDIR, path) from None
        return None
    if stat.S_ISDIR(found.st_mode):
        raise _error(errno.EISDIR, path)
    if stat.S_ISSOCK(found.st_mode):
        raise _error(errno.ENXIO, path)
    return found


def _error(number: int, path: PathLike) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))


def refusal(path: PathLike, error: Exception) -> FileError:
    """SK504 for what `write` or `require_writable` raised, with what to write instead."""
    reason = getattr(error, "strerror", None) or str(error)
    number = error.errno if isinstance(error, OSError) else None
    folder = Path(path).parent
    if folder.is_dir():
        folder = Path(os.path.realpath(path)).parent  # of what a link points to
    remedy = "Name another file."
    if not os.fspath(path):
        reason, remedy = "the name is empty", "Name a file, such as plan.json."
    elif number == errno.EISDIR:
        reason, remedy = "it is a folder", f"Name a file in it, such as {Path(path) / 'plan.json'}."
    elif number == errno.ENOTDIR or (number == errno.ENOENT and folder.exists() and not folder.is_dir()):
        reason, remedy = f"{folder} is no folder", "Name a file in a folder."
    elif number == errno.ENOENT and not folder.exists():
        reason, remedy = f"there is no folder {folder}", "Make it first, or name a file in one that exists."
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Name a file where you may write."
    return FileError("SK504", f"cannot write {os.fspath(path)!r}: {reason}", remedy)
