"""Text files are written whole or not at all; a path that is not a regular file, such as a pipe, is written to."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from splitkit.files import descriptor, refusal, require_writable, write_file


def test_a_file_is_replaced_and_keeps_its_permissions_and_its_links(tmp_path):
    file, link = tmp_path / "plan.json", tmp_path / "link.json"
    write_file(file, "one")
    file.chmod(0o640)
    link.symlink_to(file)
    write_file(link, "two")
    assert file.read_text() == "two" and link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [link, file]  # no draft


def test_a_failed_write_leaves_what_was_there(tmp_path):
    file = tmp_path / "plan.json"
    write_file(file, "one")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "\ud800")
    assert file.read_text() == "one" and [*tmp_path.iterdir()] == [file]


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "text")
    reader.join()
    assert read == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_open_file_goes_on_where_it_is(tmp_path):
    with (tmp_path / "out").open("w+") as file:
        file.write("first ")
        file.flush()
        path = f"/dev/fd/{file.fileno()}"
        assert descriptor(path) == file.fileno() and descriptor(tmp_path / "1") is None
        require_writable(path)
        write_file(path, "second")
        file.seek(0)
        assert file.read() == "first second"


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("", "the name is empty", "such as plan.json"),
        (".", "it is a folder", "Name a file in it"),
        ("none/plan.json", "there is no folder", "Make it first"),
        ("file/plan.json", "is not a folder", "Name a file in a folder"),
        ("x" * 300, "File name too long", "Name another file"),
    ],
)
def test_what_cannot_be_written_is_refused_beforehand_with_what_can(tmp_path, name, reason, remedy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for attempt in (require_writable, lambda path: write_file(path, "text")):
        with pytest.raises(OSError) as caught:
            attempt(name)
        error = refusal(name, caught.value)
        assert error.code == "SK504" and reason in error.reason and remedy in error.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
