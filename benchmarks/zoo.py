"""Many architectures through the library as a new user would take them: ``--json`` for machines.

Every architecture of `zoo_models.py` has random weights and tiny sizes, is fresh (never called before) at every door,
and is called as its documentation calls it: default ``use_cache``, to train with labels, for causal language models
with ``labels=input_ids``. Each runs in a process of its own, with a limit of time and memory, in eval and train mode:

export    whether ``torch.export.export`` alone takes it: the first call, or one without caches after a call of the
          model: the reference of
capture   ``sk.capture(model, **inputs)``.
split     into 2 stages (to train into 4, if it has the nodes), held against the model by ``sk.compare``.
joint     (to train) the halves of ``capture_joint`` under `SaveAll`: loss and gradients against the model's.
budget    (to train) ``sk.apply(model, Budget(0.7))``: the same.
memory    the simulated peak over the measured one: of forward, and of forward and backward.

A step *passes*; is *refused*, by an error with a code; *fails*, by any other error; or is *wrong*: values differ.
What of the model does not run eagerly, twice alike, is a fault of the row, and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from small_nets import loss_or_sum
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo_models import Row, rows

import splitkit as sk
from splitkit.engine.pair import Pair
from splitkit.frontends.joint_capture import DividedStep, Joint, TrainingStep, sum_of_outputs
from splitkit.memory.measurement import MeasuredMemory
from splitkit.memory.profile import MemoryProfile
from splitkit.testing.compare import Comparison

SECONDS, BYTES = 600, 8 << 30  # of one architecture, until its process is ended
BUDGET = 0.7
STAGES = {"eval": 2, "train": 4}
PACKAGES = ("torch", "transformers", "diffusers", "timm", "torch_geometric")
MEMORY = ("memory", "training memory")
PASSES, DIED = "passes", "died"
Found = dict[str, Any]


def said(error: BaseException) -> str:
    """What an error says, in a line: the reason and what torch has to say, but no more of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = "" if isinstance(error, sk.SplitError | Different) else f"{type(error).__name__}: "
    return kind + " | ".join(lines[: 3 if isinstance(error, sk.SplitError) else 1])[:500]


class Steps:
    """What came of each step of one architecture in one mode.

    Attributes:
        found: the verdict of each, why, and what else was learnt.
        tell: hears of it before and after each step.
    """

    def __init__(self, row: Row, mode: str, tell: Callable[[Found], None]) -> None:
        self.row, self.mode, self.tell = row, mode, tell
        self.found: Found = {"mode": mode, "verdicts": {}, "why": {}, "seconds": {}}

    def fresh(self) -> tuple[nn.Module, Mapping[str, Any]]:
        """The model, never called before, and its inputs."""
        torch.manual_seed(0)
        model, inputs = self.row.make(self.mode == "train")
        return model.train(self.mode == "train"), inputs

    def take(self, name: str, step: Callable[[], Any]) -> Any:
        """What the step gives; ``None`` if it did not pass."""
        self.found["verdicts"][name] = DIED  # if nobody lives to say otherwise
        self.tell(self.found)
        start, value, verdict = time.process_time(), None, PASSES
        try:
            value = step()
        except Exception as error:
            kinds = {Different: "wrong", sk.SplitError: "refused"}
            verdict = next((word for kind, word in kinds.items() if isinstance(error, kind)), "fails")
            self.found["why"][name] = said(error)
        self.found["verdicts"][name] = verdict
        self.found["seconds"][name] = time.process_time() - start
        self.tell(self.found)
        return value

    def run(self) -> None:
        """All steps."""
        self.take("eager", self.eager)
        if self.found["verdicts"]["eager"] != PASSES:
            return
        self.take("export", self.export)
        model, inputs = self.fresh()
        gm = self.take("capture", lambda: sk.capture(model, **inputs))
        if gm is not None:
            self.found["nodes"] = len(sk.analyze(gm).nodes)
            count = self.found["stages"] = STAGES[self.mode] if self.found["nodes"] >= 2 * STAGES[self.mode] else 2
            self.take("split", lambda: split(model, gm, count, inputs))
            self.take("memory", lambda: self.memory(gm, inputs))
        if self.mode == "train":
            self.train()

    def eager(self) -> None:
        """The model itself: forward and backward, twice alike, without the library."""
        first, second = (step_of(*self.fresh(), self.mode == "train") for _ in range(2))
        if not all(map(torch.equal, first, second)):
            raise Different("two runs of the model itself")

    def export(self) -> None:
        """torch alone; if it does not take the first call, with what people try next: no cache, one call before."""
        model, inputs = self.fresh()
        try:
            torch.export.export(model, (), dict(inputs))
        except Exception as error:
            self.found["why"]["export"] = said(error)
            model, inputs = self.fresh()
            without_cache(model)
            model(**inputs)
            torch.export.export(model, (), dict(inputs))

    def memory(self, gm: torch.fx.GraphModule, inputs: Mapping[str, Any]) -> None:
        """Of forward."""
        with torch.no_grad():
            measured = sk.measure_memory(gm, **inputs)
        self.predicted("memory", sk.simulate_memory(gm), measured)

    def train(self) -> None:
        """The steps of training."""
        model, inputs = self.fresh()
        joint = self.take("joint", lambda: sk.capture_joint(model, **inputs, loss=loss_or_sum))
        if joint is not None:
            pair = self.take("SaveAll", lambda: halves(model, joint, inputs))
            if pair is not None:
                self.take("training memory", lambda: self.training_memory(joint, pair, inputs))
        self.take("budget", self.budget)

    def training_memory(self, joint: Joint, pair: Pair, inputs: Mapping[str, Any]) -> None:
        """Of forward and backward."""
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        primals, tangents = joint.primals(**inputs), joint.tangents()
        held = list(primals)  # the caller holds them, run() empties the list
        measured = sk.measure_memory(pair.run, primals, tangents)
        del held
        self.predicted("training memory", profile, measured)

    def predicted(self, what: str, profile: MemoryProfile, measured: MeasuredMemory) -> None:
        """Keep how far off; of sizes that only the data decides a profile says what they take at most."""
        error = profile.peak / measured.peak - 1
        if profile.bounds and error < 0:
            raise Different(f"at most {profile.peak} bytes were predicted, {measured.peak} measured")
        self.found[f"{what} {'above' if profile.bounds else 'error'}"] = error

    def budget(self) -> None:
        """Training by a plan."""
        model, inputs = self.fresh()
        trained = sk.apply(model, sk.policies.Budget(BUDGET), **inputs)
        require_same(sk.compare(model, trained, **inputs), rounding=True)


class Different(Exception):
    """Two runs that are not the same."""


def require_same(found: Comparison, rounding: bool = False) -> None:
    """Raise if they differ; ``rounding``: graphs of autograd may run other kernels than eager mode does."""
    wrong = [d for d in found.failures if not (rounding and d in found.outputs and d.relative <= found.tolerance)]
    if wrong:
        names = ", ".join(f"{d.name} by {d.largest:.2g} of {d.scale:.2g}" for d in wrong[:3])
        raise Different(f"{len(wrong)} differ: {names}")


def step_of(model: nn.Module, inputs: Mapping[str, Any], training: bool) -> list[torch.Tensor]:
    """What the model gives, and to train the gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    output = model(**inputs)
    found = [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if training:
        loss = getattr(output, "loss", None)
        (sum_of_outputs(output) if loss is None else loss).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    return found


def without_cache(model: nn.Module) -> None:
    """In its configuration, and in those inside."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False


def split(model: nn.Module, gm: torch.fx.GraphModule, count: int, inputs: Mapping[str, Any]) -> None:
    """Into stages, and compared; if they differ, say what does so before."""
    divided = sk.split(gm, sk.policies.Stages(count))
    try:
        require_same(sk.compare(model, divided, **inputs))
    except Different as error:
        same = {
            "the model itself": sk.compare(model, model, **inputs),
            "what was captured": sk.compare(model, gm, **inputs),
        }
        also = next((f"; so does {which}" for which, found in same.items() if not found.same), "")
        raise Different(f"{error}{also}") from None


def halves(model: nn.Module, joint: Joint, inputs: Mapping[str, Any]) -> Pair:
    """Forward and backward, compared with the model's."""
    pair = joint.split(sk.policies.SaveAll())
    require_same(sk.compare(TrainingStep(model, loss_or_sum), DividedStep(joint, pair), **inputs), rounding=True)
    return pair


def inside(name: str, pipe: multiprocessing.connection.Connection) -> None:
    """What the process of an architecture does; what models print is not shown."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    (row,) = (row for row in rows() if row.name == name)
    for mode in row.modes:
        Steps(row, mode, pipe.send).run()


def examined(row: Row, context: Any) -> Found:
    """The row of the table: what was learnt in each mode, whatever becomes of the process."""
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=inside, args=(row.name, sending))
    start, modes = time.perf_counter(), dict[str, Found]()
    process.start()
    sending.close()
    with contextlib.suppress(EOFError):
        while receiving.poll(max(0.0, start + SECONDS - time.perf_counter())):
            found = receiving.recv()
            modes[found["mode"]] = found
    process.kill()
    process.join()
    for mode in row.modes:  # what the process did not live to begin
        modes.setdefault(mode, {"mode": mode, "verdicts": {"eager": DIED}, "why": {}, "seconds": {}})
    took = time.perf_counter() - start
    print(f"{row.name}: {took:.0f} s", file=sys.stderr)
    return {"name": row.name, "family": row.family, "modes": list(modes.values()), "seconds": took}


def calls_of(table: Iterable[Found]) -> list[tuple[str, Found]]:
    """Each architecture in each mode that runs eagerly."""
    return [(row["name"], mode) for row in table for mode in row["modes"] if mode["verdicts"].get("eager") == PASSES]


def summary_of(table: list[Found], skipped: Iterable[Row]) -> Found:
    """Counts, and the aims."""
    calls = calls_of(table)
    exported = [mode for _, mode in calls if mode["verdicts"]["export"] == PASSES]
    both = sum(mode["verdicts"]["capture"] == PASSES for mode in exported)
    steps = dict.fromkeys(step for _, mode in calls for step in mode["verdicts"])
    verdicts = {step: [mode["verdicts"][step] for _, mode in calls if step in mode["verdicts"]] for step in steps}
    errors = [mode[f"{key} error"] for _, mode in calls for key in MEMORY if f"{key} error" in mode]
    bounds = sum(f"{key} above" in mode for _, mode in calls for key in MEMORY)
    wrong = sum(verdict == "wrong" for found in verdicts.values() for verdict in found)
    return {
        "architectures": len(table),
        "calls": len(calls),
        "rows at fault": sum(len(row["modes"]) for row in table) - len(calls),
        "verdicts": {step: dict(Counter(found)) for step, found in verdicts.items()},
        "captured of those that export takes": f"{both} of {len(exported)}",
        "memory": {
            "predicted": len(errors), "exact": errors.count(0), "within 1 %": sum(abs(e) <= 0.01 for e in errors),
            "most": max(map(abs, errors), default=None), "at most, as only the data decides": bounds,
        },
        "aims": {
            "97 % of what export takes": both >= 0.97 * len(exported),
            "0 wrong": not wrong,
            "memory within 1 %": all(abs(e) <= 0.01 for e in errors),
        },
        "not installed": dict(Counter(row.package for row in skipped)),
        "seconds": sum(row["seconds"] for row in table),
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
    }  # fmt: skip


def show(table: list[Found]) -> None:
    """A row an architecture; below it, why what did not pass did not."""
    console = Console(width=190)
    columns = {step: [step] for step in ("export", "capture", "split", "joint", "SaveAll", "budget")}
    shown = Table("architecture", "family", "nodes", *columns, "memory", "training memory", "seconds")
    for row in table:
        nodes = "/".join(str(mode["nodes"]) for mode in row["modes"] if "nodes" in mode)
        memory = [" / ".join(filter(None, (off(mode, key) for mode in row["modes"]))) for key in MEMORY]
        shown.add_row(
            row["name"], row["family"], nodes, *(cell(row, step) for step in columns), *memory, f"{row['seconds']:.0f}"
        )
    console.print(shown)
    for row in table:
        for mode in row["modes"]:
            for step, verdict in mode["verdicts"].items():
                if verdict != PASSES:
                    why = mode["why"].get(step, "the process died")
                    console.print(
                        f"{row['name']} ({mode['mode']}), {step} {verdict}: {why}", markup=False, highlight=False
                    )


def cell(row: Found, step: str) -> str:
    """The verdict, or what does not pass in which mode."""
    found = {mode["mode"]: mode["verdicts"][step] for mode in row["modes"] if step in mode["verdicts"]}
    bad = {mode: verdict for mode, verdict in found.items() if verdict != PASSES}
    if len(set(bad.values())) == 1 and len(bad) == len(found):
        return next(iter(bad.values()))
    return ", ".join(f"{mode} {verdict}" for mode, verdict in bad.items()) or ("+" if found else "")


def off(mode: Found, what: str) -> str:
    """How far a prediction is off."""
    if f"{what} above" in mode:
        return f"at most, {100 * mode[f'{what} above']:+.0f} %"
    error = mode.get(f"{what} error")
    return "" if error is None else "exact" if error == 0 else f"{100 * error:+.2f} %"


def main() -> None:
    """Take them through, and print."""
    families = list(dict.fromkeys(row.family for row in rows()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="architectures whose names begin with one of these"
    )
    parser.add_argument("--family", nargs="*", default=families, choices=families)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args()
    wanted = [r for r in rows() if r.family in args.family and (not args.only or r.name.startswith(tuple(args.only)))]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "splitkit", *(p for p in PACKAGES if find_spec(p))])
    with ThreadPoolExecutor(args.jobs) as pool:
        table = list(pool.map(lambda row: examined(row, context), [row for row in wanted if row.installed]))
    summary = summary_of(table, [row for row in wanted if not row.installed])
    if args.json:
        print(json.dumps({"rows": table, "summary": summary}))
    else:
        show(table)
        Console(width=190).print(summary)


if __name__ == "__main__":
    main()
