"""One rank: what a training loop needs around its steps, beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_model
from same_as_whole import start
from torch import fx, nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime import Pipeline, full_state_dict, pipeline, save_pretrained, save_safetensors
from splitkit.testing.pipeline_check import UnsplitModel

MICROBATCHES = 4


class Tied(nn.Module):
    """An embedding that the head shares, dropout, and layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = h + self.drop(layer(h).tanh())
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch(seed: int, rows: int = 2 * MICROBATCHES) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randint(32, (rows, 5), generator=rng) for name in ("x", "y")}


def halves(model: nn.Module, replicas: int = 1, **inputs: torch.Tensor) -> sk.Split:
    gm = sk.capture(model, **inputs)
    plan = sk.plan(gm, sk.policies.Stages(2))
    parts = {key: replace(part, replicas=replicas) for key, part in plan.parts.items()}
    return sk.split(gm, replace(plan, parts=parts))


def tied(replicas: int = 1) -> sk.Split:
    torch.manual_seed(0)
    return halves(Tied(), replicas, **batch(0, 2))


def clip(split: sk.Split, sharded: bool = False) -> dict[str, Any]:
    """The norm and the clipped gradients, for three norms."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    if sharded:
        pipe.shard()
    unsplit, found = UnsplitModel(pipe), list[dict[str, Any]]()
    for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
        result, losses = pipe.step(**batch(step), loss_everywhere=True), unsplit.step(**batch(step))
        limit = float(torch.nn.utils.clip_grad_norm_(unsplit.model.parameters(), float("inf"), norm_type)) / 3
        true = torch.nn.utils.clip_grad_norm_(unsplit.model.parameters(), limit, norm_type)
        norm = pipe.clip_grad_norm(limit, norm_type)
        found.append(
            {
                "norm": float(norm), "true": float(true), "apart": unsplit.deviation(result, losses).gradient,
                "loss": float(result.loss), "unsplit loss": float(losses.mean()), "losses": len(result.losses),
            }
        )  # fmt: skip
        for parameter in (*pipe.parameters(), *unsplit.model.parameters()):
            parameter.grad = None
    return {"steps": found}


class Normed(nn.Module):
    """Dropout and BatchNorm, which do something else in eval mode, around layers with a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = nn.functional.dropout(self.norms[0](self.first(x)), 0.3, self.training).relu()
        h = self.norms[1](self.third(self.second(h).tanh()))
        return {"loss": (self.last(h) - x).square().mean(), "hidden": h}


def rows(seed: int, count: int = 6 * MICROBATCHES) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)) + 1


def two_modes() -> tuple[sk.Split, fx.GraphModule, nn.Module]:
    torch.manual_seed(0)
    model = Normed()
    split = halves(model, x=rows(0, 6))
    return split, sk.capture(copy.deepcopy(model).eval(), x=rows(0, 6)), model


def evaluation(prepared: tuple[sk.Split, fx.GraphModule, nn.Module]) -> dict[str, Any]:
    """Losses of a capture in eval mode with the weights that are trained, between steps of training."""
    split, in_eval, model = prepared
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    unsplit, model = UnsplitModel(pipe), copy.deepcopy(model).eval()
    held = pipe.evaluation(in_eval)
    mine, theirs = (torch.optim.SGD(p, lr=0.1) for p in (pipe.parameters(), unsplit.model.parameters()))
    found = []
    for step in range(3):
        pipe.step(rows(step)), unsplit.step(rows(step))
        for each in (mine, theirs):
            each.step(), each.zero_grad()
        model.load_state_dict(unsplit.model.state_dict())
        true = torch.stack([model(x)["loss"] for x in rows(9).chunk(MICROBATCHES)]).mean()
        outputs = held.infer(rows(9))
        found.append(
            {
                "loss": float(held.evaluate(rows(9))), "eager": float(true),
                "outputs": None if outputs is None else len(outputs),
            }
        )  # fmt: skip
    own, shared = pipe.named_tensors(), held.named_tensors()
    same = {name: own[name] is tensor for name, tensor in shared.items()}
    in_training = float(pipe.evaluate(rows(9)))
    pipe.modules[0].eval()
    return {"found": found, "same": same, "in training": in_training, "refused": refusal(lambda: pipe.step(rows(0)))}


def gpt2() -> tuple[sk.Split, nn.Module]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    return halves(model.train(), input_ids=batch(0, 2)["x"], labels=batch(0, 2)["x"]), model


def whole(prepared: tuple[sk.Split, nn.Module]) -> dict[str, Any]:
    """The trained model, gathered and written, against the unsplit one."""
    split, model = prepared
    names = set(model.state_dict())
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    unsplit = UnsplitModel(pipe)
    apart, given = train(pipe, unsplit, lambda step: {"input_ids": batch(step)["x"], "labels": batch(step)["x"]})
    state = full_state_dict(pipe)
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        folder = Path(place[0])
        save_pretrained(pipe, model, folder)
        save_safetensors(pipe, folder / "plain.safetensors")
        refused = refusal(lambda: save_pretrained(pipe, model.transformer, folder))
        absent = refusal(lambda: save_safetensors(pipe, folder / "absent" / "model.safetensors"))
        found = {"names": set(state) == names, "apart": apart, "refused": refused, "absent": absent}
        if dist.get_rank() == 0:
            loaded = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
            true = copy.deepcopy(model).eval()
            true.load_state_dict(unsplit.model.state_dict())
            plain = copy.deepcopy(model).eval()
            load_model(plain, folder / "plain.safetensors")
            logits = [each(given["input_ids"]).logits for each in (true, loaded, plain)]
            found["logits"] = [float((other - logits[0]).abs().max()) for other in logits[1:]]
            found["moved"] = float((logits[0] - copy.deepcopy(model).eval()(given["input_ids"]).logits).abs().max())
            found["tied"] = state["lm_head.weight"] is state["transformer.wte.weight"]
            found["state"] = max(float((t - unsplit.model.state_dict()[n]).abs().max()) for n, t in state.items())
        dist.barrier()
    return found


def gathered_shards(split: sk.Split) -> dict[str, Any]:
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    pipe.shard()
    unsplit = UnsplitModel(pipe)
    train(pipe, unsplit, batch)
    state = full_state_dict(pipe)
    true = unsplit.model.state_dict()
    return {"names": set(state) == set(true), "apart": [float((t - true[n]).abs().max()) for n, t in state.items()]}


def train(pipe: Pipeline, unsplit: UnsplitModel, given: Callable[[int], dict[str, torch.Tensor]]) -> tuple[Any, Any]:
    """Two steps of both."""
    mine, theirs = (torch.optim.SGD(p, lr=0.5) for p in (pipe.parameters(), unsplit.model.parameters()))
    for step in range(2):
        result, losses = pipe.step(**given(step)), unsplit.step(**given(step))
        apart = unsplit.deviation(result, losses).gradient
        for each in (mine, theirs):
            each.step(), each.zero_grad()
    return apart, given(9)


def refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except SplitError as error:
        return str(error)
    return ""


CASES: dict[str, tuple[int, Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "clip": (2, tied, clip),
    "clip replicas": (4, lambda: tied(2), clip),
    "evaluation": (2, two_modes, evaluation),
    "whole": (2, gpt2, whole),
    "gathered shards": (4, lambda: tied(2), gathered_shards),
    "clip shards": (4, lambda: tied(2), lambda split: clip(split, sharded=True)),
}
"""Name -> ranks, what is prepared once, what each rank does with it."""
PREPARED: dict[str, Any] = {}


def prepare() -> None:
    torch.set_num_threads(1)
    for name in json.loads(sys.argv[1]):
        PREPARED[name] = CASES[name][1]()


def main() -> None:
    start()
    for name, prepared in PREPARED.items():
        ranks, _, body = CASES[name]
        if ranks == dist.get_world_size():
            print(json.dumps({"case": name, "rank": dist.get_rank()} | body(prepared)), flush=True)
    dist.destroy_process_group()
