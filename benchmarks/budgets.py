"""Does a smaller budget ever give a higher peak? torch's memory budget and splitkit's, on many models.

``python benchmarks/budgets.py [--models 50] [--rows FOLDER] [--json]`` captures the training step of many models: five
families of one and two layers, small configurations of transformers, and the other architectures of `zoo_models.py`.
Each step is divided by torch's partitioner at several values of ``activation_memory_budget`` and by ``Budget(share)``
at the same numbers, and run op by op on the CPU. For each division there are the peak that
`splitkit.simulate_memory` predicts and the measured peak, both in bytes, including everything that the caller holds.

A *rise* is a pair of budgets where the smaller budget has the higher measured peak. Under a budget torch's partitioner
draws the random numbers of dropout again in backward, where they differ: a lower peak with wrong gradients, so rows say
where it does. Each model runs in a process of its
own and leaves its row as a file in the folder; models with a file there are not run again, so a run that was cut off
goes on where it was. What the library or torch refuses is listed, and the next model takes its place.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from small_nets import loss_or_sum
from torch import nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from zoo_models import rows

import splitkit as sk
from splitkit.costs.fused import is_random
from splitkit.engine.pair import Pair
from splitkit.errors import message_line
from splitkit.frontends.joint_capture import Joint
from splitkit.policies import Budget
from splitkit.testing import models

BUDGETS = (0.0, 0.1, 0.3, 0.5, 1.0)
WHO = ("torch", "splitkit")
SECONDS = 600  # of one model, until its process is ended
SIZES = {"width": 32, "heads": 2, "vocab": 64, "batch": 2}
FAMILIES: dict[str, dict[str, int]] = {
    "gpt2": SIZES, "llama": SIZES, "bert": SIZES, "t5": SIZES, "vit": {"width": 32, "heads": 2, "batch": 2},
}  # fmt: skip
DEEPEST = {"gpt2": 2, "llama": 2, "bert": 2, "t5": 1, "vit": 2}
Made = tuple[nn.Module, Mapping[str, Any]]
Found = dict[str, Any]
T = TypeVar("T")


def specimens() -> dict[str, Callable[[], Made]]:
    """Return name -> a function that makes the model, in the mode for training, and its inputs."""
    deep = [(f"{family}-{n}", _deep(family, n)) for n in (1, 2) for family in FAMILIES if n <= DEEPEST[family]]
    plain, families = [], dict[str, list[tuple[str, Callable[[], Made]]]]()
    for row in rows():
        if row.installed and "train" in row.modes:
            (plain if row.package == "torch" else families.setdefault(row.family, [])).append((row.name, _row(row)))
    return dict(_in_turns(_in_turns(*families.values()), deep, plain))


def _in_turns(*lists: Iterable[T]) -> Iterator[T]:
    """Yield the first item of each list, then the second of each, so that few items are of many lists."""
    return (item for item in chain.from_iterable(zip_longest(*lists)) if item is not None)


def _deep(family: str, layers: int) -> Callable[[], Made]:
    def make() -> Made:
        example = models.build(family, **FAMILIES[family], layers=layers)
        return example.model, example.kwargs

    return make


def _row(row: Any) -> Callable[[], Made]:
    def make() -> Made:
        model, inputs = row.make(True)
        return model.train(), inputs

    return make


def peaks(joint: Joint, pair: Pair, inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the predicted and the measured peak of a step in bytes, and the bytes that the caller holds."""
    predicted = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def run(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return pair.run(list(primals), tangents)

    found = sk.measure_memory(run, joint.primals(**inputs), joint.tangents())
    return predicted, found.peak, found.baseline


def draws_again(pair: Pair) -> bool:
    """Return whether backward draws random numbers: other ones than forward did, so that gradients are wrong."""
    return any(map(is_random, pair.backward.graph.nodes))


def row_of(name: str, budgets: Sequence[float] = BUDGETS) -> Found:
    """Return the peaks of one model at all budgets."""
    torch.manual_seed(0)
    start = time.process_time()
    model, inputs = specimens()[name]()
    joint = sk.capture_joint(model, **inputs, loss=loss_or_sum)
    found: Found = {"model": name, "nodes": len(joint.graph_module.graph.nodes), "budgets": list(budgets)}
    found |= {who: {"predicted": [], "measured": [], "draws again": []} for who in WHO}
    for budget in budgets:
        with config.patch(activation_memory_budget=budget):
            theirs = joint.partition(min_cut_rematerialization_partition)
        for who, pair in zip(WHO, (theirs, joint.split(Budget(budget))), strict=True):
            predicted, measured, found["held"] = peaks(joint, pair, inputs)
            found[who]["predicted"].append(predicted)
            found[who]["measured"].append(measured)
            found[who]["draws again"].append(draws_again(pair))
    return found | {"seconds": time.process_time() - start}


def rises(measured: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs (smaller, larger) of positions in a rising row of budgets where the peak is higher before."""
    return [(i, j) for i, j in combinations(range(len(measured)), 2) if measured[i] > measured[j]]


def _write(name: str, file: Path) -> None:
    """Write the row of one model, or why there is none."""
    torch.set_num_threads(1)
    try:
        found = row_of(name)
    except Exception as error:  # of torch, of the library, or of the model
        found = {"model": name, "error": f"{type(error).__name__}: {message_line(error)[:300]}"}
    file.write_text(json.dumps(found))


def table(count: int, folder: Path) -> list[Found]:
    """Return the rows of so many models; models without a file in the folder are run."""
    folder.mkdir(parents=True, exist_ok=True)
    context, found = multiprocessing.get_context("forkserver"), list[Found]()
    context.set_forkserver_preload(["transformers", "zoo_models", "splitkit.frontends.joint_capture", "scipy.optimize"])
    for name in specimens():
        file = folder / f"{name}.json"
        if not file.exists():
            process = context.Process(target=_write, args=(name, file))
            process.start()
            process.join(SECONDS)
            if process.is_alive():
                process.kill()
            process.join()
            if not file.exists():
                file.write_text(json.dumps({"model": name, "error": f"ended after {SECONDS} s, or died"}))
        found.append(json.loads(file.read_text()))
        if sum("error" not in row for row in found) == count:
            break
    return found


def summary(found: Sequence[Found]) -> Found:
    """Return the figures over all models."""
    complete = [row for row in found if "error" not in row]
    pairs = sum(len(row["budgets"]) * (len(row["budgets"]) - 1) // 2 for row in complete)
    total: Found = {"models": len(complete), "pairs of budgets": pairs}
    for kind in ("measured", "predicted"):
        risen = {who: [(row["model"], rises(row[who][kind])) for row in complete] for who in WHO}
        total[f"{kind} rises"] = {who: sum(len(at) for _, at in risen[who]) for who in WHO}
        total[f"models with {kind} rises"] = {who: sum(bool(at) for _, at in risen[who]) for who in WHO}
    total["predicted is measured"] = {
        who: sum(sum(map(int.__eq__, row[who]["predicted"], row[who]["measured"])) for row in complete) for who in WHO
    }
    wrong = [row for row in complete if any(row["torch"]["draws again"])]
    total["models in which torch draws random numbers again"] = len(wrong)
    for name, chosen in (("all", complete), ("no numbers drawn again", [row for row in complete if row not in wrong])):
        ratios = [_lowest(row) for row in chosen]
        total[f"lowest peak above what the caller holds, splitkit / torch, {name}"] = _spread(ratios)
    return total | {"left out": {row["model"]: row["error"] for row in found if "error" in row}}


def _lowest(row: Found) -> float:
    theirs, ours = (min(row[who]["measured"]) - row["held"] for who in WHO)
    return float(ours / theirs)


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    if not ratios:
        return {}
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main(arguments: list[str] | None = None) -> None:
    """Print the figures over all models, and with ``--json`` the rows too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--rows", type=Path, default=Path("build/budgets"), help="folder of the rows")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = table(given.models, given.rows)
    total = summary(found)
    if given.json:
        print(json.dumps({**total, "rows": found}))
        return
    for row in found:
        if "error" not in row:
            print(row["model"], *(f"{who}: {len(rises(row[who]['measured']))} rises" for who in WHO))
    for name, figure in total.items():
        print(f"{name}: {figure}")


if __name__ == "__main__":
    main()
