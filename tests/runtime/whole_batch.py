"""A rank of `test_whole_batch`: losses and gradients of steps, and those of the model on the whole batch in eager."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capturedmodels import stored
from same_as_whole import start
from torch import fx, nn
from torch.nn.functional import cross_entropy, mse_loss

import splitkit as sk
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime import pipeline
from splitkit.testing.pipeline_check import gradient_of, relative_difference
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

torch.manual_seed(0)
M, ROWS, LENGTH = 4, 2, 6
Batch = Mapping[str, Any]


class SequenceFirst(nn.Module):
    """Takes ``[length, rows, 8]``; each place of a sequence depends on those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x).cumsum(0).tanh())
        return {"loss": y.sum(0).square().mean(), "y": y}


class Recurrent(nn.Module):
    """Export fixes the length of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(self.first(x)[0])
        return {"loss": y.square().sum(0).mean(), "y": y}


class Tokens(nn.Module):
    """A language model whose loss is a sum over kept labels, or their mean; positions are ``[3, rows, length]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(11, 8), nn.Linear(3, 8), nn.Linear(8, 11)

    def forward(self, ids, labels, positions, num_items_in_batch=None):
        y = self.head((self.embed(ids) + self.place(positions.permute(1, 2, 0).float())).tanh()).flatten(0, 1)
        if num_items_in_batch is None:
            return {"loss": cross_entropy(y, labels.flatten())}
        return {"loss": cross_entropy(y, labels.flatten(), reduction="sum") / num_items_in_batch}


def sequences(rows: int, length: int = LENGTH) -> dict[str, Any]:
    return {"x": torch.randn(length, rows, 8)}


def apart_in_columns(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The microbatches of a batch, each with gaps in memory."""
    return [{"x": x} for x in batch["x"].split(ROWS, 1)]


def tokens(rows: int, length: int = LENGTH, number: bool = False, none_in: int = 0) -> dict[str, Any]:
    """Each row keeps fewer labels than the one before it, and the first ``none_in`` rows none."""
    ids = torch.randint(11, (rows, length))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : length if row < none_in else row % length] = -100
    made = {"ids": ids, "labels": labels, "positions": torch.randint(5, (3, rows, length))}
    return made | ({"num_items_in_batch": (labels != -100).sum()} if number else {})


def kept(inputs: Batch) -> torch.Tensor:
    return (inputs["labels"] != -100).sum()


def to_target(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean over labels that are kept, of logits and labels with the length first."""
    return cross_entropy(output["y"].flatten(0, 1), target.flatten())


def labels_of(x: torch.Tensor) -> torch.Tensor:
    labels = torch.randint(8, x.shape[:2])
    for row in range(x.shape[1]):
        labels[: row % x.shape[0], row] = -100
    return labels


FIRST = {"x": 1}
CASES: dict[str, dict[str, Any]] = {
    "sequence first": {"model": SequenceFirst, "batch": [sequences(8)], "batch_dims": FIRST},
    "sequence first, other sizes": {
        "model": SequenceFirst,
        "batch": [sequences(8), sequences(11, 7), sequences(8, 24)],
        "batch_dims": FIRST,
        "dynamic": True,
    },
    "sequence first, microbatches": {
        "model": SequenceFirst,
        "batch": [[sequences(2, 5), sequences(3, 5), sequences(2, 5), sequences(4, 5)]],
        "batch_dims": FIRST,
        "dynamic": True,
    },
    "sequence first, target": {
        "model": SequenceFirst,
        "batch": [sequences(8)],
        "batch_dims": {**FIRST, "target": 1},
        "reduction": lambda inputs: (inputs["target"] != -100).sum(),
        "target": labels_of,
    },
    "LSTM": {"model": Recurrent, "batch": [sequences(8), sequences(11)], "batch_dims": FIRST, "dynamic": True},
    "a sum": {"model": Tokens, "batch": [tokens(8, number=True)], "reduction": "sum", "evaluates": kept},
    "a sum, replicas": {
        "model": Tokens,
        "batch": [tokens(8, number=True)],
        "reduction": "sum",
        "replicas": 2,
        "evaluates": kept,
    },
    "a mean of kept labels": {
        "model": Tokens,
        "batch": [tokens(8), tokens(11, 9), tokens(8, none_in=2)],
        "reduction": kept,
        "batch_dims": {"ids": 0},
        "dynamic": True,
    },
    "a mean of kept labels, replicas": {
        "model": Tokens,
        "batch": [tokens(8), tokens(8, none_in=2)],
        "reduction": kept,
        "replicas": 2,
    },
    "a mean of rows": {"model": Tokens, "batch": [tokens(8) | {"labels": torch.randint(11, (8, LENGTH))}]},
}
JOINT: dict[str, dict[str, Any]] = {
    "joint, sequence first": {"model": SequenceFirst, "batch": [sequences(8)], "batch_dims": FIRST},
    "joint, sequence first, microbatches": {"model": SequenceFirst, "batch": [apart_in_columns(sequences(8))]},
    "joint, a sum": {"model": Tokens, "batch": [tokens(8, number=True)], "reduction": "sum"},
    "joint, a mean of kept labels": {"model": Tokens, "batch": [tokens(8), tokens(8, none_in=2)], "reduction": kept},
}


@cache
def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def example_of(case: dict[str, Any], number: bool | None = None) -> dict[str, Any]:
    if case["model"] is not Tokens:
        return sequences(ROWS)
    return tokens(ROWS, number="num_items_in_batch" in case["batch"][0] if number is None else number)


CAPTURED: dict[str, Any] = {}


def prepare() -> None:
    """Capture once for all ranks."""
    torch.set_num_threads(1)

    @cache
    def captured(kind: type[nn.Module], dynamic: bool, names: tuple[str, ...]) -> fx.GraphModule:
        example = sequences(ROWS) if kind is not Tokens else tokens(ROWS, number="num_items_in_batch" in names)
        what = f"{kind.__name__} {dynamic} {names} of {Path(__file__).read_text()}"
        return stored(what, lambda: sk.capture(model_of(kind), dynamic=dynamic, **example))

    for name, case in CASES.items():
        both = [tuple(example_of(case)), tuple(example_of(case, number=False))]
        made = [captured(case["model"], case.get("dynamic", False), names) for names in both]
        CAPTURED[name] = [copy.deepcopy(gm) for gm in made]
    for name, case in JOINT.items():
        CAPTURED[name] = sk.capture_joint(copy.deepcopy(model_of(case["model"])), **example_of(case))


def split_of(gm: fx.GraphModule, replicas: int) -> Split:
    plan = sk.plan(gm, sk.policies.Stages(1 if replicas > 1 else 2), sk.costs.unit(gm))
    return sk.split(gm, replace(plan, parts={k: replace(p, replicas=replicas) for k, p in plan.parts.items()}))


def whole(case: dict[str, Any], batch: Any, target: Any = None) -> tuple[nn.Module, torch.Tensor, Any]:
    """The model after forward and backward of the whole batch, its loss and its output."""
    model = copy.deepcopy(model_of(case["model"]))
    if isinstance(batch, list):
        batch = {"x": torch.cat([each["x"] for each in batch], 1)}
    output = model(**batch)
    loss = output["loss"] if target is None else to_target(output, target)
    loss.backward()
    return model, loss.detach(), output


def apart(own: Mapping[str, torch.Tensor], model: nn.Module) -> float:
    """The largest relative difference of a gradient."""
    known = dict(model.named_parameters())
    largest = max(float(gradient_of(t).abs().max()) for t in known.values())
    pairs = [(gradient_of(t), gradient_of(known[name])) for name, t in own.items() if name in known]
    return max((relative_difference(mine, other, 1e-3 * largest) for mine, other in pairs), default=0.0)


def run(name: str) -> list[float]:
    """Differences of the gradients, the loss, the output, and the loss in evaluation."""
    case, (trained, evaluated) = CASES[name], CAPTURED[name]
    torch.manual_seed(1)
    given = {key: case[key] for key in ("reduction", "batch_dims") if key in case}
    loss = to_target if "target" in case else None
    pipe = pipeline(split_of(trained, case.get("replicas", 1)), "1f1b", M, loss=loss, **given)
    other = pipe.evaluation(evaluated, case.get("evaluates")) if "target" not in case else None
    seen = []
    for batch in case["batch"]:
        target = case["target"](batch["x"]) if "target" in case else None
        model, wanted, output = whole(case, batch, target)
        call = {"microbatches": batch} if isinstance(batch, list) else dict(batch)
        found = pipe.step(**call, target=target, loss_everywhere=True)
        seen += [apart(pipe.named_parameters(), model), relative_difference(found.loss, wanted)]
        for parameter in pipe.parameters():
            parameter.grad = None
        if (made := pipe.infer(**call)) is not None and "y" in output:
            seen.append(relative_difference(torch.cat([each["y"] for each in made], 1), output["y"]))
        if other is not None:
            call.pop("num_items_in_batch", None)
            seen.append(relative_difference(other.evaluate(**call), wanted))
    return seen


def staged(name: str) -> tuple[Any, Any]:
    joint = CAPTURED[name]
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    stages = {n: int(i >= len(forward) // 2) for i, n in enumerate(forward)}
    return joint, joint.split(stage_plan(joint.flow, stages))


def run_joint(name: str) -> list[float]:
    case = JOINT[name]
    given = {key: case[key] for key in ("reduction", "batch_dims") if key in case}
    pipe = pipeline(staged(name)[1], "1f1b", M, **given)
    seen = []
    for batch in case["batch"]:
        model, wanted, _ = whole(case, batch)
        found = pipe.step(**({"microbatches": batch} if isinstance(batch, list) else batch))
        seen += [apart(pipe.named_parameters(), model)]
        seen += [] if found.loss is None else [relative_difference(found.loss, wanted)]
        for parameter in pipe.parameters():
            parameter.grad = None
    return seen


def refusals() -> dict[str, str]:
    """What both ranks say before anything is sent, and what a pipeline does after that."""
    torch.manual_seed(1)
    fixed = pipeline(split_of(CAPTURED["sequence first"][0], 1), "1f1b", M)
    varied = pipeline(split_of(CAPTURED["sequence first, other sizes"][0], 1), "1f1b", M)
    lstm = pipeline(split_of(CAPTURED["LSTM"][0], 1), "1f1b", M)
    summed = pipeline(split_of(CAPTURED["a sum"][0], 1), "1f1b", M, reduction="sum")
    first = {**sequences(8), "target": torch.zeros(LENGTH, 8, 8)}
    named = pipeline(
        split_of(CAPTURED["sequence first"][0], 1), "1f1b", M, batch_dims=FIRST, loss=lambda o, t: mse_loss(o["y"], t)
    )
    own = tokens(ROWS, number=True)
    uneven = [sequences(2), sequences(2, 9), sequences(2), sequences(2)]
    calls = {
        "one microbatch": lambda: fixed.step(**sequences(ROWS)),
        "one microbatch, infer": lambda: fixed.infer(**sequences(ROWS)),
        "dimension 1": lambda: fixed.step(**sequences(8)),
        "dimension 1, dynamic": lambda: varied.step(**sequences(8)),
        "dimension 1, other sizes": lambda: varied.infer(**sequences(11, 9)),
        "dimension 1, LSTM": lambda: lstm.step(**sequences(8)),
        "lengths of microbatches": lambda: varied.step(microbatches=uneven),
        "target": lambda: named.step(**first),
        # each rank is given what it reads, so neither can tell alone
        "a rank each": lambda: summed.step(**{name: value for name, value in own.items() if name in summed.needs}),
        "evaluation": lambda: summed.evaluation(CAPTURED["a sum"][1]),
        "unknown": lambda: pipeline(split_of(CAPTURED["a sum"][0], 1), "1f1b", M, reduction="sum", batch_dims={"x": 1}),
        "mean of terms": lambda: pipeline(split_of(CAPTURED["a sum"][0], 1), "1f1b", M),
        "joint, mean of terms": lambda: pipeline(staged("joint, a sum")[1], "1f1b", M),
        "reduction": lambda: pipeline(split_of(CAPTURED["a sum"][0], 1), "1f1b", M, reduction="max"),
        "differs": lambda: pipeline(
            split_of(CAPTURED["a sum"][0], 1), "1f1b", M, reduction="mean" if dist.get_rank() else "sum"
        ),
    }  # fmt: skip
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except PipelineError as error:
            said[name] = f"{error.code}: {error.reason} {error.remedy}"
    return said


def main() -> None:
    start()
    for name in (*CASES, *JOINT):
        found = {"case": name, "apart": run(name) if name in CASES else run_joint(name)}
        print(json.dumps(found | {"rank": dist.get_rank()}), flush=True)
    print(json.dumps({"said": refusals(), "rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()
