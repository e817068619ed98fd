"""Commands write to files, links, pipes and standard output, or refuse an output before they do any work."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading

import pytest
from userfolder import FACTORIES, PLAN, is_a_plan

from splitkit.cli import main


def test_an_output_is_written_into_a_device_or_a_pipe(mine):
    terminal, device = os.openpty()  # a device that cannot be replaced, should this fail again
    name = os.ttyname(device)
    os.mkfifo(mine / "pipe")
    read = []
    readers = [
        threading.Thread(target=lambda: read.append((mine / "pipe").read_text())),
        threading.Thread(target=lambda: read.append(os.read(terminal, 100).decode())),
    ]
    for reader in readers:
        reader.start()
    schedule = ["--schedule", "gpipe", "--costs", "roofline:h200"]
    assert main([*PLAN, "-o", "pipe"]) == main([*PLAN, *schedule, "--trace", name]) == 0
    for reader in readers:
        reader.join(60)
    os.close(device), os.close(terminal)
    assert stat.S_ISFIFO((mine / "pipe").stat().st_mode)
    assert any('"splitkit plan"' in text for text in read) and any("traceEvents" in text for text in read)
    assert {p.name for p in mine.iterdir()} - {"__pycache__"} == {"folder", "my.py", "pipe"}


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing yet"])
def test_an_output_is_written_through_a_link(mine, there):
    target = mine / "folder" / "real.json"
    if there:
        target.write_text("old")
        target.chmod(0o600)
    (mine / "link.json").symlink_to("folder/real.json")
    (mine / "second.json").symlink_to("link.json")
    assert main([*PLAN, "-o", "second.json"]) == 0
    assert (mine / "second.json").is_symlink() and (mine / "link.json").is_symlink()
    assert not target.is_symlink() and is_a_plan(target)
    assert not there or stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [p.name for p in target.parent.iterdir()] == ["real.json"]


def test_parts_are_written_through_links_in_their_folder(mine):
    (mine / "link").symlink_to("folder")
    (mine / "kept.py").write_text("old")
    (mine / "folder" / "parent.py").symlink_to("../kept.py")
    assert main(["split", "my.py:net", "--stages", "2", "-o", "link", "--force"]) == 0
    assert (mine / "link").is_symlink() and (mine / "folder" / "parent.py").is_symlink()
    assert "submod_1" in (mine / "kept.py").read_text()


@pytest.mark.parametrize("name", ["/dev/stdout", "-", "/dev/fd/1", "link"])
def test_an_output_may_be_standard_output(mine, name, capfd):
    (mine / "link").symlink_to("/dev/stdout")
    assert main([*PLAN, "-o", name]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["kind"] == "splitkit plan"
    assert "2 stages" in err
    assert main([*PLAN, "-o", name, "--json"]) == 2
    assert "SK603" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "it is a folder"),
        ("folder/", "it is a folder"),
        ("new/", "it is a folder"),
        ("none/p.json", "there is no folder none"),
        ("my.py/p.json", "my.py is not a folder"),
        ("", "the name is empty"),
        ("loop", "levels of symbolic links"),
        ("dangling", "there is no folder"),
        ("a" * 300, "too long"),
        ("a" * 300 + "/p.json", "too long"),
        ("/dev/fd/998", "Bad file descriptor"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        [*PLAN, "-o"],
        [*PLAN, "--schedule", "gpipe", "--costs", "roofline:h200", "--trace"],
        ["plan", "my.py:net", "--what", "fwd-bwd", "--memory", "1GiB", "-o"],
    ],
    ids=["plan", "trace", "step"],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(mine, no_work, capsys, words, name, says):
    (mine / "loop").symlink_to("loop")
    (mine / "dangling").symlink_to("none/p.json")
    assert main([*words, name]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: SK504: cannot write ") and says in err and err.count("\n") == 2


@pytest.mark.parametrize(
    "words",
    [
        [*PLAN, "-o", "my.py"],
        [*PLAN, "-o", "folder/../my.py"],
        ["plan", "my.py:net", "--devices", "mine.toml", "-o", "mine.toml"],
        [*PLAN, "--costs", "roofline:mine.toml:a", "-o", "mine.toml"],
        [*PLAN, "--schedule", "gpipe", "-o", "t.json", "--trace", "./t.json"],
    ],
)
def test_an_output_that_the_command_reads_is_refused(mine, no_work, capsys, words):
    (mine / "mine.toml").write_text("")
    assert main(words) == 2
    assert "error: SK603" in capsys.readouterr().err
    assert (mine / "my.py").read_text() == FACTORIES


def test_an_interrupted_write_leaves_no_draft(mine, monkeypatch):
    from splitkit.plans import plan_file

    def stop(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        plan_file.write_json(mine / "p.json", {})
    assert sorted(p.name for p in mine.iterdir()) == ["folder", "my.py"]
    assert main([*PLAN, "-o", "p.json"]) == 130


def test_what_libraries_print_past_python_stays_out_of_the_json(monkeypatch, capfd):
    from splitkit.cli.commands import policies

    listed = policies.run

    def noisy(args):
        os.write(1, b"noise of a library\n")
        return listed(args)

    monkeypatch.setattr(policies, "run", noisy)
    assert main(["policies", "--json"]) == 0
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert json.loads(out)["command"] == "policies" and "noise" in err


def test_a_folder_that_becomes_full_while_parts_are_written_is_told_and_leaves_nothing(mine, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("splitkit.plans.plan_file.write_json", full)
    assert main(["split", "my.py:net", "--stages", "2", "-o", "parts"]) == 1
    assert "error: SK504: cannot write parts: No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in mine.iterdir() if "parts" in path.name) == []


def test_the_command_captures_as_it_is_told(mine, capsys):
    for how, nodes in (("export", "call_function 3"), ("symbolic_trace", "call_module 3")):
        assert main(["capture", "my.py:net", "--how", how]) == 0
        assert nodes in capsys.readouterr().out
