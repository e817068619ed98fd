"""Write files whole or not at all; write to devices, pipes and links, but never replace them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from splitkit.errors import FileError

PathLike = str | os.PathLike[str]


PICTURES = (".svg", ".png", ".pdf", ".jpg", ".jpeg", ".gif")
"""Endings of names of pictures; of these, splitkit writes SVG."""


def suffix_of(path: PathLike) -> str:
    """Return the ending of a file's name in small letters: ``".svg"``."""
    return Path(path).suffix.lower()


def write_file(path: PathLike, text: str) -> None:
    """Write a text file.

    If writing fails, a regular file stays as it was; its permissions never change. A link stays a link, and its target
    is written in the same way. A device or a pipe (``/dev/stdout``) is written to directly.

    Raises:
        OSError: if it cannot be written.
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
    if found is not None and not os.access(
        target, os.W_OK
    ):  # a rename ignores the permissions of the file that it replaces
        raise _error(errno.EACCES, target)
    if found is not None and not os.access(target.parent, os.W_OK | os.X_OK):
        _write_into(target, text)
        return
    draft = target.with_name(f".splitkit-{os.urandom(8).hex()}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        if found is not None:
            draft.chmod(stat.S_IMODE(found.st_mode))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def require_writable(path: PathLike) -> None:
    """Raise the ``OSError`` that `write_file` would raise, as far as it can be known beforehand; change nothing."""
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
    """Raise ``OSError`` if no file can be created in a folder."""
    import tempfile  # here, since it is slow to load

    with tempfile.TemporaryFile(dir=folder):  # without a name, on systems that support that
        pass


def descriptor(path: PathLike) -> int | None:
    """Return the file descriptor of this process that a path names (``/dev/stdout`` names 1), or ``None``.

    Opening such a path would truncate the file, and what was printed into it would be lost.
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
    """Return the status of the file at a path, ``None`` if there is none; raise ``OSError`` if it cannot be a file."""
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


def save_text(path: PathLike, text: str) -> None:
    """Write a text file with `write_file`.

    Raises:
        FileError: SK504 if it cannot be written.
    """
    try:
        write_file(path, text)
    except (OSError, ValueError) as error:
        raise refusal(path, error) from error


def refusal(path: PathLike, error: Exception) -> FileError:
    """Return the error SK504 for an error of `write_file` or `require_writable`, with a path that would work."""
    if (
        not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG
    ):  # the name or the text is at fault, not the file system
        return FileError(
            "SK504",
            f"cannot write {os.fspath(path)!r:.200}: {getattr(error, 'strerror', None) or error}",
            "Name another file.",
        )
    reason, number = error.strerror or str(error), error.errno
    folder = Path(path).parent
    if folder.is_dir():
        folder = Path(os.path.realpath(path)).parent  # the folder of a link's target
    remedy = "Name another file."
    if not os.fspath(path):
        reason, remedy = "the name is empty", "Name a file, such as plan.json."
    elif number == errno.EISDIR:
        reason, remedy = "it is a folder", f"Name a file in it, such as {Path(path) / 'plan.json'}."
    elif number == errno.ENOTDIR or (number == errno.ENOENT and folder.exists() and not folder.is_dir()):
        reason, remedy = f"{folder} is not a folder", "Name a file in a folder."
    elif number == errno.ENOENT and not folder.exists():
        reason, remedy = f"there is no folder {folder}", "Make it first, or name a file in one that exists."
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Name a file where you may write."
    return FileError("SK504", f"cannot write {os.fspath(path)!r}: {reason}", remedy)
