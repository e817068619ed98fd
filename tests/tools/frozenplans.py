"""Stored plans of twelve models: ``python tests/tools/frozenplans.py [MODEL]`` compares, ``--write`` stores.

A change that moves or removes code must leave every row as it is, or make a plan better. A row has the borders (how
many nodes each part has, and a hash of which), the claim (value and bound), and the bytes and seconds of each part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE / "tests" / "helpers"))

import splitkit as sk  # noqa: E402 - of this tree
from splitkit.costs import roofline  # noqa: E402
from splitkit.engine.staged_step import StagedStep  # noqa: E402
from splitkit.errors import SplitError  # noqa: E402
from splitkit.frontends.joint_capture import Joint  # noqa: E402
from splitkit.policies import (  # noqa: E402
    Budget,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    Precompute,
    RoundRobin,
    SplitBackward,
    Stages,
)  # fmt: skip
from splitkit.testing import models  # noqa: E402

STORED = HERE / "tests" / "laws" / "frozen_plans.json"
BUILT_IN = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", _TEXT),
    "gemma2": ("Gemma2", {**_TEXT, "head_dim": 16}),
    "opt": ("OPT", {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
                    "vocab_size": 256, "word_embed_proj_dim": 64, "max_position_embeddings": 64}),
    "phi": ("Phi", {k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 4}),
}  # fmt: skip
FIGURES = ("bytes_in", "bytes_out", "flops", "parameter_bytes", "replicas", "share")
FEW = 12
"""Of more parts than these only the sums are stored."""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def forward_policies(gm: Any) -> dict[str, Any]:
    total = sum(t.numel() * t.element_size() for t in gm.state_dict().values())
    return {
        "RoundRobin(3)": RoundRobin(3),
        **{f"Stages({n})": Stages(n) for n in (2, 4, 8)},
        "Stages(4, links)": Stages(4, links="pcie4"),
        "Stages(4, memory)": Stages(4, memory=[int(total * 0.5)] * 4),
        "Stages(3, tight memory)": Stages(3, memory=int(total * 0.6)),
        "Devices(unequal, pieces=1)": Devices(["h100", "l4", "a100"], links="pcie4", pieces=1),
        "Stages(replicas)": Stages(4, replicas=(1, 2), links="nvlink4"),
        **{
            f"Stages({s})": Stages(4, schedule=s, microbatches=8, memory="1GiB", links="nvlink4")
            for s in ("gpipe", "1f1b")
        },
        "Stages(Interleaved1F1B)": Stages(4, schedule="Interleaved1F1B", microbatches=4, links="nvlink4"),
        "Devices": Devices(["h100", "h100", "a100"], links="pcie4"),
        "Devices(pieces=None)": Devices(["h100"] * 2, links="pcie4", pieces=None),
        "Devices(latency)": Devices({"cuda:0": "h100", "cuda:1": "l4"}, links="pcie4", objective="latency"),
        "Devices(memory)": Devices({"cuda:0": "h100", "cpu": "cpu"}, links="pcie4", memory=int(total * 0.6)),
        "MemoryBudget": MemoryBudget(int(total * 0.5)),
        "Expert(2)": Expert(2),
    }


def joint_policies() -> dict[str, Any]:
    return {
        "MinCut": MinCut(),
        "Precompute": Precompute(),
        "SplitBackward": SplitBackward(),
        "Budget(0.6, saved)": Budget(0.6, of="saved"),
        "Budget(0.95, peak)": Budget(0.95, of="peak"),
        "Budget(least)": Budget("least", of="peak"),
        "Budget(offload)": Budget(0.6, offload=1e15),
        **{
            f"Pipeline({s})": Pipeline(4 if s.startswith("Int") else 2, s, microbatches=4, links="nvlink4")
            for s in SCHEDULES
        },
        "Pipeline(offload)": Pipeline(2, "gpipe", microbatches=4, memory="1TiB", offload=1e15),
        "Pipeline(3, memory)": Pipeline(3, "1f1b", microbatches=6, memory="900MiB", links="nvlink4"),
    }


def graphs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each model's name, and what captures it."""

    def built_in(name: str, how: Callable[..., Any], layers: int) -> Any:
        example = models.build(name, 0, layers=layers)
        return how(example.model, *example.args, **example.kwargs)

    def other(kind: str, sizes: dict[str, Any]) -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        cls = getattr(transformers, f"{kind}ForCausalLM")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return sk.capture(cls(config).eval(), torch.zeros(2, 16, dtype=torch.long), use_cache=False)

    for name in BUILT_IN:
        yield name, lambda name=name: built_in(name, sk.capture, 4)  # type: ignore[misc]
    for name, (kind, sizes) in OTHERS.items():
        yield name, lambda kind=kind, sizes=sizes: other(kind, sizes)  # type: ignore[misc]
    for name in BUILT_IN:
        yield f"{name} joint", lambda name=name: built_in(name, sk.capture_joint, 2)  # type: ignore[misc]


def row(flow: Any, costs: Any, gm: Any, policy: Any) -> dict[str, Any]:
    """The facts of a plan; the code of the refusal where there is none."""
    try:
        plan = policy.assign(flow, costs)
    except SplitError as error:
        return {"refused": error.code}
    labels = sorted(map(str, plan.labels)) if hasattr(plan, "labels") else sorted({str(p) for p in plan.parts})
    where = [[str(k) for k in plan.places.get(node, ())] for node in flow.nodes]
    counts = [sum(label in keys for keys in where) for label in labels]
    found: dict[str, Any] = {
        "nodes": counts if len(counts) <= FEW else len(counts),
        "places": hashlib.sha256(json.dumps(where).encode()).hexdigest()[:12],
    }
    if plan.claim is not None:
        found |= {"objective": plan.claim.objective, "value": plan.claim.value, "bound": plan.claim.bound}
    try:
        figures = sk.report(gm, plan, costs).to_dict()["parts"]
        kept = {key: [part[key] for part in figures] for key in FIGURES if figures and key in figures[0]}
        found |= kept if len(counts) <= FEW else {key: sum(values) for key, values in kept.items()}
    except SplitError as error:
        found["report"] = error.code
    if (stages := stages_of(gm, plan, costs)) is not None:
        schedule = plan.request.schedule if plan.request is not None else None
        with contextlib.suppress(SplitError):  # parts that are not a pipeline's stages
            run = sk.simulate_schedule(stages, schedule or "1f1b", 4, links="nvlink4")
            found |= {"step": run.seconds, "peaks": list(run.peaks)}
    return found


def stages_of(gm: Any, plan: Any, costs: Any) -> Any:
    """The costs of a plan's stages; None where it has no stages, or too many."""
    with contextlib.suppress(SplitError):
        if isinstance(gm, Joint):
            step = gm.split(plan)
            return step.stage_costs(costs) if isinstance(step, StagedStep) else None
        return sk.stage_costs(sk.analyze(gm), plan, costs) if len(plan.parts) <= FEW else None
    return None


def table(only: str = "") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, capture in graphs():
        if only not in name:
            continue
        began = time.monotonic()
        graph = capture()
        joint = name.endswith(" joint")
        gm = graph.graph_module if joint else graph
        flow = graph.flow if joint else sk.analyze(gm)
        costs = roofline(gm, "a100")
        for label, policy in (joint_policies() if joint else forward_policies(gm)).items():
            found[f"{name}: {label}"] = row(flow, costs, graph if joint else gm, policy)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not as it was, one line each; a better value or bound says so."""
    lines = [f"{key}: only {'stored' if key in then else 'now'}" for key in sorted(then.keys() ^ now.keys())]
    for key in sorted(then.keys() & now.keys()):
        old, new = then[key], now[key]
        if old != new:
            what = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
            lines.append(
                f"{key}: {', '.join(what)}; value {old.get('value')} -> {new.get('value')}, "
                f"bound {old.get('bound')} -> {new.get('bound')}"
            )
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    only = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    now = table(only)
    if "--write" in sys.argv:
        STORED.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in now.items()) + "\n}\n")
        return
    then = {key: value for key, value in json.loads(STORED.read_text()).items() if only in key.split(":")[0]}
    lines = differences(then, now)
    print("\n".join([*lines, f"{len(now)} plans, {len(lines)} differ"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
