"""The command says what to write after a mistyped word, a factory that fails, or a file that is not a plan."""

from __future__ import annotations

import pytest
from userfolder import FACTORIES

from splitkit.cli import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "gpt2", "--stages", "0"], "Write --stages 1 or more"),
        (["plan", "gpt2", "--stages", "-2"], "Write --stages 1 or more"),
        (["plan", "gpt2", "--stages", "two"], "Write --stages 1 or more"),
        (["plan", "gpt2", "--stages"], "Write --stages=N"),
        (["sweep", "gpt2", "--stages", "2,0"], "Write --stages numbers of 1 or more: 2,4,8"),
        (["capture", "gpt2", "--size", "layers=x"], "Write --size layers=N"),
        (["capture", "gpt2", "--seed", "-1"], "Write --seed 0 or more"),
        (["plna", "gpt2"], "Did you mean plan?"),
        (["capture", "gpt2", "--dynamc"], "Did you mean --dynamic?"),
        (["plan", "gpt2", "--stages", "2", "--on-cycle", "merg"], "Did you mean merge?"),
        (["plan", "gpt2", "--stages", "2", "--costs", "rofline:a100"], "Did you mean roofline?"),
        (["capture", "gtp2"], "Did you mean gpt2?"),
        (["plan", "GPT-2", "--stages", "2"], "Did you mean gpt2?"),
        (["run", "my.py", "--stages", "2"], "Write my.py:FUNCTION, such as my.py:net; its functions: net, needs."),
        (["profile", "my.py:"], "such as my.py:net"),
        (["sweep", "my"], "Did you mean my.py:net?"),
        (["capture", ":net"], "Write my_model.py:net."),
        (["capture", "my.py:net:x"], "Write my.py:net."),
        (["capture", "none.py"], "Name a file that exists"),
        (["capture", "mi.py"], "Did you mean my.py:net?"),
        (["capture", "plan.json"], "Pass a model"),
        (["run", "saved", "--check"], "Did you mean saved.json?"),
        (["split", ".", "--stages", "2"], "Write my.py:net."),
        (["train", "gpt2", "--stages", "2", "--nproc", "2", "--trace", "-"], "Name a file: --trace trace.json."),
        (["train", "gpt2", "--stages", "2", "--nproc", "2", "--steps", "1", "--trace", "t.json"], "--steps 2 or more"),
        (["profile", "gpt2", "--ranks", "2", "--stages", "2", "--trace", "-"], "Name a file: --trace trace.json."),
        (["profile", "gpt2", "--trace", "t.json"], "Add --ranks N."),
    ],
)
def test_a_mistyped_word_is_refused_before_the_work_with_what_to_write(mine, no_work, capsys, words, says):
    (mine / "saved.json").write_text("{}")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: SK") and says in err and err.count("\n") == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", ["error: ValueError: no checkpoint here", "my.py:11, in broken()"]),
        ("wrong_inside", ["error: TypeError: object of type 'int'", "my.py:15, in wrong_inside()"]),
        ("needs", ["SK403", "needs(width)", "--size width=8"]),
        ("nte", ["SK403", "Did you mean my.py:net?"]),
        ("module_only", ["SK403", "without inputs", "Return (module, args)"]),
        ("model", ["SK403", "is a module", "Return (module, args)"]),
    ],
)
def test_a_factory_that_fails_is_named_with_its_line(mine, capsys, name, says):
    assert main(["capture", f"my.py:{name}"]) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in says), err


def test_a_factory_may_import_modules_beside_it(mine, capsys):
    (mine / "folder" / "my_own_helpers.py").write_text("WIDTH = 4\n")
    text = "from my_own_helpers import WIDTH\n" + FACTORIES
    (mine / "folder" / "other.py").write_text(text)
    assert main(["capture", "folder/other.py:net"]) == 0


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b'{"command": "plan"}', b'{"kind": "splitkit split"}', b"[]"])
def test_a_file_that_is_no_plan_is_refused_with_what_to_write(mine, no_work, capsys, text):
    (mine / "p.json").write_bytes(text)
    assert main(["run", "p.json"]) == 1
    assert capsys.readouterr().err.count("\n") == 2
    assert main(["run", "none.json"]) == main(["run", "folder/../none.json"]) == 1
    assert capsys.readouterr().err.count("splitkit plan MODEL") == 2
