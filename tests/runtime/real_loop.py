"""One rank: what a training loop needs around its steps, beside the unsplit model; a JSON line for each case."""

from __future__ import annotations

import copy
import json
import os
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
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.runtime import open_checkpoints, pipeline, save_pretrained
from splitkit.runtime.folder.whole_model import full_state_dict, save_safetensors
from splitkit.runtime.ranks.pipeline import Pipeline
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


def halves(model: nn.Module, replicas: int = 1, **inputs: torch.Tensor) -> Split:
    gm = sk.capture(model, **inputs)
    plan = sk.plan(gm, sk.policies.Stages(2))
    parts = {key: replace(part, replicas=replicas) for key, part in plan.parts.items()}
    return sk.split(gm, replace(plan, parts=parts))


def tied(replicas: int = 1) -> Split:
    torch.manual_seed(0)
    return halves(Tied(), replicas, **batch(0, 2))


def clip(split: Split, sharded: bool = False) -> dict[str, Any]:
    """The norm and the clipped gradients of two steps that accumulate, for three norms."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    if sharded:
        pipe.shard()
    unsplit, found = UnsplitModel(pipe), list[dict[str, Any]]()
    for step, norm_type in enumerate((2.0, 1.0, float("inf"))):
        pipe.step(**batch(step + 3)), unsplit.step(**batch(step + 3))
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


def two_modes() -> tuple[Split, fx.GraphModule, nn.Module]:
    torch.manual_seed(0)
    model = Normed()
    split = halves(model, x=rows(0, 6))
    return split, sk.capture(copy.deepcopy(model).eval(), x=rows(0, 6)), model


def evaluation(prepared: tuple[Split, fx.GraphModule, nn.Module]) -> dict[str, Any]:
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


def normed() -> Split:
    torch.manual_seed(0)
    return halves(Normed(), x=rows(0, 6))


def frozen(split: Split) -> dict[str, Any]:
    """Layers frozen and unfrozen between steps: a whole stage, one layer, none, all but one layer of the last stage."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    unsplit, found, own = UnsplitModel(pipe), list[float](), set(pipe.named_parameters())
    first = {id(unsplit.held[name]) for name, _ in pipe.split.parts[0].named_parameters()}
    whole = {name for name, tensor in unsplit.held.items() if id(tensor) in first}
    for step, still in enumerate([whole, {"norms.1.weight"}, set(), set(unsplit.held) - {"last.weight"}]):
        pipe.train_only(lambda name, still=still: name not in still)
        for name, tensor in unsplit.held.items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name not in still)
                tensor.grad = None
        for parameter in pipe.parameters():
            parameter.grad = None
        result, losses = pipe.step(rows(step)), unsplit.step(rows(step))
        found.append(unsplit.deviation(result, losses).gradient)
        trained = {name for name, p in pipe.named_parameters().items() if p.grad is not None and p.grad.any()}
        assert trained <= own - still and ("last.weight" in trained) == ("last.weight" in own), (trained, own, still)
    pipe.train_only(lambda name: True)
    next(iter(pipe.named_parameters().values())).requires_grad_(False)
    quiet = refusal(lambda: pipe.step(rows(0)))
    differs = refusal(lambda: pipe.train_only(lambda name: dist.get_rank() == 0))
    return {"apart": found, "quiet": quiet, "differs": differs, "frozen": len(whole)}


class Shallow(nn.Module):
    """Its second half has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).tanh().sigmoid() - 1).square().mean()


def bare() -> Split:
    torch.manual_seed(0)
    gm = sk.capture(Shallow(), rows(0, 6))
    return sk.split(gm, lambda node: int(node.name in ("sigmoid", "sub", "pow_1", "square", "mean")))


def without_parameters(split: Split) -> dict[str, Any]:
    """The usual loop, on a rank without parameters too, with several steps for one of the optimizer."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    unsplit = UnsplitModel(pipe)
    mine, theirs = (torch.optim.AdamW(p, lr=0.1) for p in (pipe.parameters(), unsplit.model.parameters()))
    for step in range(2):
        for part in range(3):
            result, losses = pipe.step(rows(3 * step + part)), unsplit.step(rows(3 * step + part))
        norm, true = pipe.clip_grad_norm(1e-3), torch.nn.utils.clip_grad_norm_(unsplit.model.parameters(), 1e-3)
        apart = unsplit.deviation(result, losses)
        for each in (mine, theirs):
            each.step(), each.zero_grad()
    folder = os.environ["SPLITKIT_STORE"].removeprefix("file://") + ".checkpoints"
    open_checkpoints(folder, pipe, mine).save()
    kept = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for tensor in pipe.state_dict().values():
        tensor.zero_()
    open_checkpoints(folder, pipe, mine, resume=True)
    resumed = all(torch.equal(tensor, kept[name]) for name, tensor in pipe.state_dict().items())
    found = {"apart": [apart.gradient, apart.weight], "norm": float(norm / true), "resumed": resumed}
    return {**found, "own": len(pipe.named_parameters())}


def needed(split: Split) -> dict[str, Any]:
    """Inputs only where they are read, and a batch that rank 0 sends."""
    pipe = pipeline(split, "1f1b", MICROBATCHES)
    unsplit, given = UnsplitModel(pipe), batch(0)
    losses = unsplit.step(**given)
    read = {name: value for name, value in given.items() if name in pipe.needs}
    result = pipe.step(**read)
    apart = [unsplit.deviation(result, losses).gradient]
    for parameter in pipe.parameters():
        parameter.grad = None
    absent = {name: value if name in pipe.needs else None for name, value in given.items()}
    pipe.steps = 0
    result = pipe.step(**absent)
    apart.append(unsplit.deviation(result, losses).gradient)
    refused = refusal(lambda: pipe.step(**dict.fromkeys(given)))
    sent = pipe.broadcast({"x": given["x"], "more": [given["y"].float(), "text"]} if pipe.rank == 0 else None)
    same = torch.equal(sent["x"], given["x"]) and torch.equal(sent["more"][0], given["y"].float())
    missing = refusal(lambda: pipe.step())
    return {
        "needs": sorted(pipe.needs), "apart": apart, "refused": refused, "missing": missing, "text": sent["more"][1],
        "same": same,
    }  # fmt: skip


def gpt2() -> tuple[Split, nn.Module]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    return halves(model.train(), input_ids=batch(0, 2)["x"], labels=batch(0, 2)["x"]), model


def whole(prepared: tuple[Split, nn.Module]) -> dict[str, Any]:
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
            held = {tensor.data_ptr() for tensor in pipe.state_dict().values()}
            found["copied"] = held.isdisjoint(tensor.data_ptr() for tensor in state.values())
            found["tied"] = state["lm_head.weight"] is state["transformer.wte.weight"]
            found["state"] = max(float((t - unsplit.model.state_dict()[n]).abs().max()) for n, t in state.items())
        dist.barrier()
    return found


def gathered_shards(split: Split) -> dict[str, Any]:
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
    "needed": (2, tied, needed),
    "frozen": (2, normed, frozen),
    "without parameters": (2, bare, without_parameters),
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
