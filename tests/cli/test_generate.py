"""``splitkit generate``: from a model or a plan to the tokens of the unsplit model, on one process for each stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoders import tokenizer
from launch import command

from splitkit.cli import launcher
from splitkit.testing import models

SIZES = {"layers": 2, "width": 32, "heads": 2, "vocab": 64}
TINY = ["--size", ",".join(f"{name}={value}" for name, value in SIZES.items()), "--seed", "3"]


@pytest.fixture(scope="module")
def expected():
    """The tokens that the unsplit model adds to a prompt."""
    model = models.build("llama", seed=3, **SIZES).model.eval()

    def tokens(prompt, count):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        return [made[0, len(prompt) :].tolist()]

    return tokens


@pytest.mark.campaign  # the whole road of test_fit goes through both
def test_a_plan_and_a_folder_of_stages_give_the_tokens_of_the_model(tmp_path, call, expected):
    plan, stages, asked = (str(tmp_path / name) for name in ("plan.json", "stages", "asked.jsonl"))
    Path(asked).write_text(
        '{"prompt": ["w9", "w4 w4 w8"], "max_new_tokens": 2}\n{"prompt": 5}\n{"input_ids": [9], "max_new_tokens": 3}\n'
        '\n{"input_ids": [99]}\n{"input_ids": [4], "cats": 3}\n{"input_ids": [4\n'
    )
    code, out, _ = call("plan", "llama", *TINY, "--how", "decoder", "--stages", "2", "-o", plan)
    assert code == 0 and f"next: splitkit generate {plan} --prompt-ids 1,2,3" in out
    assert call("split", plan, "-o", stages)[0] == 0
    words = [
        "--tokenizer",
        tokenizer(tmp_path, SIZES["vocab"]),
        "--prompt",
        "w5 w6 w7",
        "--prompt-ids",
        "5,6,7",
        "--requests",
        asked,
        "--max-new-tokens",
        "8",
        "--chunk",
        "2",
    ]
    for target in (plan, stages):
        done = command("generate", target, *words, "--json")
        data = json.loads(done.stdout)
        # four requests fail, and the others do not
        assert done.returncode == 1
        first, two = expected([5, 6, 7], 8), expected([9], 2) + expected([4, 4, 8], 2)
        made = [result["tokens"] for result in data["results"]]
        assert made == [first, first, two, [], expected([9], 3), [], [], []]
        codes = [result["error"] and result["error"]["code"] for result in data["results"]]
        assert codes == [None, None, None, "SK802", None, *["SK802"] * 3]
        assert [result["text"] for result in data["results"]] == [
            [" ".join(f"w{token}" for token in row) for row in rows] for rows in made
        ]
        assert data["weights"] is None
        assert [rank["rank"] for rank in data["ranks"]] == [0, 1] and all(rank["weights"] for rank in data["ranks"])


def test_text_without_a_tokenizer_is_refused_before_any_rank_starts(call, monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "answer", lambda *given: pytest.fail("ranks were started"))
    said = call("generate", "llama", "--stages", "2", "--prompt", "hello")
    assert said[0] == 2 and "give token ids: --prompt-ids 5,6,7" in said[2]
    plan = Path(tokenizer(tmp_path, SIZES["vocab"])) / "plan.json"
    assert call("plan", "llama", *TINY, "--how", "decoder", "--stages", "2", "-o", plan)[0] == 0
    said = call("generate", plan, "--prompt", "hello")
    assert said[0] == 2 and f"Add --tokenizer {plan.parent}." in said[2]
    said = call("generate", plan, "--requests", tmp_path / "none.jsonl")
    assert said[0] == 1 and "SK504" in said[2]


@pytest.mark.campaign
def test_torchrun_reads_a_checkpoint_and_gives_the_tokens_of_the_model(tmp_path, call):
    """As README says it, from the checkpoint of a model whose plan and stages know no weights of it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=64, num_local_experts=4, eos_token_id=None)
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(folder := str(tmp_path / "mixtral"), max_shard_size="20KB")
    plan, stages, asked = (str(tmp_path / name) for name in ("plan.json", "stages", "asked.jsonl"))
    assert call("plan", folder, "--how", "decoder", "--stages", "2", "-o", plan)[0] == 0
    assert call("split", plan, "-o", stages)[0] == 0
    Path(asked).write_text('{"input_ids": [5, 6, 7], "max_new_tokens": 8}\n{"input_ids": [99]}\n')
    words = ["generate", stages, "--weights", folder, "--requests", asked, "--json"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "splitkit"]
    run = subprocess.run([*start, *words], text=True, stdout=subprocess.PIPE, timeout=300)
    data = json.loads(run.stdout)
    made = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    # torchrun would end the other ranks if one ended with 1
    assert run.returncode == 0 and [result["tokens"] for result in data["results"]] == [[made], []]
    assert data["results"][1]["error"]["code"] == "SK802" and data["weights"] == folder


@pytest.mark.campaign
def test_an_encoder_is_read_from_the_checkpoint_of_a_folder_of_stages(tmp_path, call):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder := str(tmp_path / "t5"))
    plan, stages, asked = (str(tmp_path / name) for name in ("plan.json", "stages", "asked.jsonl"))
    code, out, _ = call("plan", folder, "--how", "decoder", "--stages", "2", "-o", plan)
    assert code == 0 and f"splitkit generate stages --weights {folder} --prompt-ids 1,2,3" in out
    assert call("split", plan, "-o", stages)[0] == 0
    Path(asked).write_text('{"input_ids": [[5, 6, 7, 8], [9, 3]], "max_new_tokens": 5}\n')
    words = ["--prompt-ids", "5,6,7", "--max-new-tokens", "8", "--requests", asked, "--json"]
    data = json.loads(command("generate", stages, "--weights", folder, *words).stdout)
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
    both = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=5, do_sample=False)[:, 1:].tolist()
    one = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[:, 1:].tolist()
    assert [result["tokens"] for result in data["results"]] == [one, both]


def test_a_model_is_planned_and_generates_in_one_command(expected):
    done = command("generate", "llama", *TINY, "--stages", "2", "--prompt-ids", "5,6,7", "--max-new-tokens", "4")
    assert done.returncode == 0
    assert "0: " + " ".join(map(str, expected([5, 6, 7], 4)[0])) in done.stdout
    assert "4 tokens for 1 requests" in done.stdout


def test_what_no_rank_could_run_is_refused_before_there_are_ranks(tmp_path, call, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("splitkit.cli.launcher.ranks", lambda *given: pytest.fail("ranks were started"))
    plan = str(tmp_path / "plan.json")
    assert call("plan", "llama", *TINY, "--stages", "2", "-o", plan)[0] == 0
    # a configuration beside its checkpoint
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    for words, says in (
        ([plan, "--prompt-ids", "5"], "SK601: " + plan + " is a plan for another graph"),
        (["llama", "--stages", "2"], "SK601: there is nothing to continue"),
        (["llama", "--prompt-ids", "5"], "SK601: llama needs a policy"),
        ([str(tmp_path), "--stages", "2", "--prompt-ids", "5"], "SK601: the weights would be random"),
        (["llama", "--stages", "2", "--prompt-ids", "5", "--weights", "x"], "SK601: --weights needs a folder"),
    ):
        code, _, error = call("generate", *words)
        assert code == 2 and says in error
    code, _, error = call("train", "llama", *TINY, "--how", "decoder", "--stages", "2", "--nproc", "2")
    assert code == 2 and "SK601: the graph is one step of generation" in error
