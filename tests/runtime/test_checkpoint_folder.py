"""Digests of the files of a folder: what they are, and the refusal of files that differ from what was written."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest
import torch

from splitkit.errors import FileError, PipelineError
from splitkit.runtime.devices.accelerators import RequireDevice
from splitkit.runtime.folder import checkpoint_folder
from splitkit.runtime.folder.checkpoint_folder import _write_durably, digest_of_file, require_intact, stored_digests


@pytest.mark.parametrize("count", [0, 1, 2**20 - 1, 2**20, 2**20 + 7])
def test_a_digest_is_the_size_and_the_crc_of_the_whole_file(tmp_path, count):
    data = bytes(i * 7 % 251 for i in range(1000)) * (count // 1000 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:count])
    assert digest_of_file(path) == f"{count}-{zlib.crc32(data[:count]):08x}"


def test_a_file_that_is_missing_or_differs_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    digests = {name: digest_of_file(tmp_path / name) for name in "ab"}
    require_intact(tmp_path, digests, ["a", "b"], "Load another.")
    (tmp_path / "b").write_text("c")
    texts = {
        "b": f"{tmp_path / 'b'} is damaged, or a file of another folder: its size and checksum are "
        f"1-{zlib.crc32(b'c'):08x}, and {digests['b']} in digests.json",
        "none": f"{tmp_path} is damaged: it has no none",
    }
    for name, text in texts.items():
        with pytest.raises(FileError) as caught:
            require_intact(tmp_path, digests, ["a", name], "Load another.")
        assert str(caught.value) == f"SK505: {text}\n  Load another." and caught.value.nodes == (name,)
    with pytest.raises(FileError, match="and none in digests.json"):
        require_intact(tmp_path, {}, ["a"], "")


def test_the_digests_that_a_folder_has(tmp_path):
    assert stored_digests(tmp_path, "") == {}
    path = tmp_path / "digests.json"
    path.write_text(json.dumps({"a": "1-2"}))
    assert stored_digests(tmp_path, "") == {"a": "1-2"}
    for text, reason in (
        ('{"../a": "1-2"}', "about files of this folder, as '../a' is"),
        ("[1]", ""),
        ('{"a": 1}', ""),
    ):
        path.write_text(text)
        with pytest.raises(FileError) as caught:
            stored_digests(tmp_path, "Load another.")
        assert caught.value.code == "SK505" and caught.value.reason.startswith(f"{path} is damaged: ")
        assert reason in caught.value.reason and caught.value.remedy == "Load another."


def test_an_input_that_the_graph_writes_must_be_on_the_device_that_writes_it():
    guard = RequireDevice("x", torch.device("cpu"))
    assert guard(3) is not None and not [*guard.parameters()]
    with pytest.raises(PipelineError, match=r"^SK808: the input x is on meta, and cpu writes it\n  Give it on cpu\.$"):
        guard(torch.ones(1, device="meta"))


def test_a_full_disk_is_said_as_such_and_leaves_no_draft(tmp_path, monkeypatch):
    """Also where there is no draft yet."""
    _write_durably(tmp_path / "run.json", {"step": 1})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for where, name in ((Path, "write_text"), (checkpoint_folder, "_sync")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
            patch.setattr(where, name, full)
            _write_durably(tmp_path / "run.json", {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == {"step": 1}
