"""The format of torchtitan: the modules of each stage, a schedule CSV and the memory policy.

Read: torchtitan 0.3.0, ``config/configs.py`` and ``distributed/pipeline_parallel.py``. ``_split_module`` looks at the
children of the model and at the items of its lists. Every rank has as many stages, in a loop, or in a V for
ZBVZeroBubble and DualPipeV (``_get_pp_rank_to_stage_indices_mapping``). Models of ``transformers`` have the names of
torchtitan there: ``tok_embeddings``, ``layers.0``, ``norm``, ``lm_head``.
"""

from __future__ import annotations

import json
import re

from splitkit.exports.carried_plan import CarriedPlan, LayerSequence, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat, literal, no_such_text, python_values

_EXAMPLE = 'module_fqns_per_model_part=[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
_V = ("ZBVZeroBubble", "DualPipeV")
_TORCHS = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *_V)


def titan_names(sequence: LayerSequence) -> dict[str, str]:
    """Return module of the model -> its name in torchtitan.

    Raises:
        PlanError: SK523 if the model is not a decoder with one embedding, one norm and one head.
    """
    if len(sequence.lists) > 1:
        reason = f"the model has the lists of blocks {', '.join(sequence.lists)}, but torchtitan's models have one"
        raise cannot_carry("torchtitan", reason, "Export to torch or accelerate.")
    names = [name for layer in sequence.layers for name in layer.names]
    if all(re.fullmatch(r"[^.]+(\.\d+)?", name) for name in names):
        return {name: name for name in names}  # a model of torchtitan, whose lists are children of the model
    blocks = [i for i, layer in enumerate(sequence.layers) if layer.block is not None]
    before = names[: blocks[0]]
    behind = names[blocks[-1] + 1 :]
    if len(before) != 1 or len(behind) != 2 or not sequence.embeds_tokens:
        raise cannot_carry(
            "torchtitan",
            "its models have tok_embeddings, layers.N, norm and lm_head, and this one has "
            f"{', '.join(before) or 'nothing'} before its layers and {', '.join(behind) or 'nothing'} behind them",
            "Export to torch or accelerate.",
        )
    inner = {names[i]: f"layers.{position}" for position, i in enumerate(blocks)}
    return {before[0]: "tok_embeddings", **inner, behind[0]: "norm", behind[1]: "lm_head"}


def _write(carried: CarriedPlan) -> str:
    named = titan_names(carried.sequence)
    stages = [[named[name] for name in names] for names in carried.names]
    children = dict(carried.sequence.flow.root.named_children())
    # rotary tables are in every stage, as torchtitan's own splits have them
    for name in carried.sequence.shared_modules:
        for own in stages:
            own.append(name if name in children else name.split(".")[-1])
    lists = [f"        {json.dumps(names)}," for names in stages]
    schedule, ranks = _schedule(carried)
    policy = _policy(carried)
    csv = (
        ['    pipeline_parallel_schedule_csv="order.csv",  # the file of --order'] if carried.order is not None else []
    )
    return "\n".join(
        [
            "from torchtitan.config import ParallelismConfig",
            "",
            "parallelism = ParallelismConfig(",
            f"    pipeline_parallel_degree={ranks},",
            f'    pipeline_parallel_schedule="{schedule}",',
            *csv,
            "    module_fqns_per_model_part=[",
            *lists,
            "    ],",
            ")",
            f"# command line: --compile.memory_policy {policy}",
            "",
        ]
    )


def _schedule(carried: CarriedPlan) -> tuple[str, int]:
    """Return the name that gives each rank its stages, and the number of ranks."""
    stages, ranks, rank_of = carried.stages, carried.ranks, carried.rank_of
    loop = tuple(s % ranks for s in range(stages))
    v = tuple(min(s, 2 * ranks - 1 - s) for s in range(stages))
    if stages % ranks:
        raise cannot_carry(
            "torchtitan",
            f"every rank has the same number of stages there, and {stages} stages are on {ranks} ranks",
            "Use a number of stages that the ranks divide, or export to torch, whose runtime takes any placement.",
        )
    name = carried.order.name if carried.order is not None else "1F1B"
    if rank_of == loop:
        fits = [known for known in _TORCHS if known not in _V]
        return name if name in fits else "1F1B" if stages == ranks else "Interleaved1F1B", ranks
    if stages == 2 * ranks and rank_of == v:
        return name if name in _V else "ZBVZeroBubble", ranks
    raise cannot_carry(
        "torchtitan",
        f"stages are on ranks in a loop or a V there, and here on the ranks {', '.join(map(str, rank_of))}",
        "Use --placement loop or V, or export to torch, whose runtime takes any placement.",
    )


def _policy(carried: CarriedPlan) -> str:
    flags = {flag for stage in carried.recomputed_blocks for flag in stage}
    if len(flags) > 1:
        raise cannot_carry(
            "torchtitan",
            "its memory policy holds for all stages, and the plan recomputes some of its layers",
            "Plan with recompute in all stages or in none.",
        )
    return "full" if flags == {True} else "default"


def _read(text: str) -> StagesInText:
    for name, expression in python_values(text):
        if name == "module_fqns_per_model_part":
            return _stages(literal(expression))
    return _stages(literal(text.strip()))


def _stages(found: object) -> StagesInText:
    lists = found if isinstance(found, list) and found else [None]
    if not all(isinstance(names, list) and names and all(isinstance(n, str) for n in names) for names in lists):
        raise no_such_text("torchtitan", "it has no list with a list of module names for each stage", _EXAMPLE)
    return StagesInText(modules=tuple(tuple(names or ()) for names in lists))


TORCHTITAN = ExportFormat(
    name="torchtitan",
    tool="torchtitan",
    where="the parallelism= of a config function; the schedule: --order FILE.csv",
    level="layers",
    write=_write,
    read=_read,
    known_by=r"module_fqns_per_model_part|\A\s*\[\s*\[\s*[\"']",
    schedules="csv",
    recompute=True,
    example=_EXAMPLE,
)
