"""``splitkit fit``: its JSON, its exit codes, and that the command that it names next runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from launch import command

from splitkit.cli import main
from splitkit.cli.parser import make_parser
from splitkit.testing.config_models import config_example

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 160,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))


def run(capsys, *words, code=0):
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_json_has_bytes_by_device(capsys):
    found = run(capsys, "fit", "config.json", "--devices", "2x1MiB", "--tokens", "64")
    assert found["fits"] is True and found["tokens"] > 64 and found["context"] == 128
    for device in found["devices"]:
        held = device["weights"] + device["cache"] + device["activations"]
        assert held == device["total"] <= device["limit"] == 2**20 - 2**20 // 20
    assert sum(device["cache"] for device in found["devices"]) == 64 * 4 * 2 * 4 * 16 * 4


def test_what_does_not_fit_ends_with_3(capsys):
    found = run(capsys, "fit", "config.json", "--devices", "2x400KiB", "--tokens", "64", code=3)
    assert found["fits"] is False and found["next"] is None and found["alternatives"]
    assert main(["fit", "config.json", "--devices", "2x400KiB", "--tokens", "64"]) == 3
    text = capsys.readouterr().out
    assert "does not fit" in text and "too much" in text and "more device" in text


@pytest.mark.parametrize(
    ("layers", "options"),
    these_first(
        [(2, ["--devices", "420KiB,490KiB", "--tokens", "64"])],
        [
            (4, ["--devices", "600KiB,700KiB", "--tokens", "64"]),
            (4, ["--devices", "2x8MiB", "--tokens", "32", "--train", "sgd", "--recompute", "--microbatches", "2"]),
            (4, ["--devices", "2x600KiB", "--tokens", "64"]),
            (4, ["--devices", "2x300KiB", "--tokens", "64", "--dtype", "int4"]),
            (4, ["--devices", "2x8MiB", "--tokens", "32", "--train", "adamw"]),
        ],
    ),
)
def test_the_next_command_plans_the_model(capsys, layers, options):
    Path("config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    words = shlex.split(run(capsys, "fit", ".", *options)["next"])
    assert words[0] == "splitkit"
    planned = run(capsys, *words[1:])
    assert len(planned["report"]["parts"]) == 2 and Path("plan.json").is_file()
    if "--train" in options:
        return
    assert words[2:7] == [".", "--size", "batch=1", "--how", "decoder"]
    # no --model: a configuration runs no code of a user
    assert main(["split", "plan.json", "-o", "stages"]) == 0


def test_the_next_command_of_training_has_its_options(capsys):
    options = ["--devices", "2x8MiB", "--tokens", "32", "--train", "sgd", "--recompute", "--microbatches", "2"]
    words = shlex.split(run(capsys, "fit", ".", *options)["next"])
    assert words[:3] == ["splitkit", "plan", "."]
    told = make_parser().parse_args(words[1:])
    assert (told.schedule, told.optimizer, told.recompute) == ("1f1b", "sgd", True)
    assert (str(told.stages), str(told.microbatches), told.output) == ("2", "2", "plan.json")
    assert "--memory" in words and "seq=32" in " ".join(words)


@pytest.mark.campaign  # its commands are above, in test_generate, and one after another in the eighth notebook
def test_the_whole_road_from_a_configuration_to_tokens(capsys, tmp_path):
    words = shlex.split(run(capsys, "fit", str(tmp_path), "--devices", "2x600KiB", "--tokens", "64")["next"])
    run(capsys, *words[1:-1], str(tmp_path / "plan.json"))
    claim = json.loads(Path("plan.json").read_text())["claim"]
    assert claim["objective"] == "tokens" and claim["value"] >= 64
    done = command("generate", str(tmp_path / "plan.json"), "--prompt-ids", "5,6,7", "--max-new-tokens", "4", "--json")
    model = config_example(".").model.eval()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert json.loads(done.stdout)["results"][0]["tokens"] == [expected[0, 3:].tolist()]


def test_wrong_usage_ends_with_2_or_1(capsys):
    assert main(["fit", "config.json", "--train", "lion"]) == 2
    assert run(capsys, "fit", "config.json", "--devices", "2x24", code=2)["error"]["code"] == "SK302"
    assert run(capsys, "fit", "config.json", "--devices", "1e400GiB", code=2)["error"]["code"] == "SK302"
    assert run(capsys, "fit", "config.json", "--devices", "2x0GiB", code=2)["error"]["code"] == "SK302"
    for wrong in ({"quantization_config": "gptq"}, {"model_type": "no such model"}):
        Path("wrong.json").write_text(json.dumps(CONFIG | wrong))
        error = run(capsys, "fit", "wrong.json", "--devices", "24GiB", code=1)["error"]
        assert error["code"] == "SK401" and "of wrong.json: " in error["reason"] and len(error["reason"]) < 200
    assert run(capsys, "fit", "config.json", "--devices", "rtx-9", code=1)["error"]["code"] == "SK321"
    assert run(capsys, "fit", "none/config.json", code=1)["error"]["code"] == "SK504"
    assert run(capsys, "fit", "lama", code=2)["error"]["code"] == "SK402"
    assert run(capsys, "plan", "config.json", "--stages", "2", "--size", "width=4", code=1)["error"]["code"] == "SK403"


def test_the_page_runs_as_shown():
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, {})
    commands = re.findall(r"^splitkit (fit .*?)(?:  +#.*)?$", page, re.M)
    assert len(commands) == 4
    for words in commands:
        assert make_parser().parse_args(shlex.split(words)).command == "fit"
