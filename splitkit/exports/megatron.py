"""The format of Megatron-LM: a layout string and the flags of recompute.

Read: megatron-core 0.16.1, ``megatron/core/transformer/pipeline_parallel_layer_layout.py`` (``parse_str_to_list``,
``validate_layer_layout``) and ``transformer_block.py`` (``_checkpointed_forward``)::

    Et*3|(t*2|)*29,m|L     E embedding, t layer, m multi-token prediction, L loss; | next stage; x*n and (...)*n repeat

Stages are listed in the order in which they run: with interleaving, stage s is on rank s mod PP.
"""

from __future__ import annotations

import re
from itertools import groupby

from splitkit.exports.carried_plan import CarriedPlan, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat, no_such_text

_EXAMPLE = "Et*3|t*4|t*4|t*3L"
_FLAG = re.compile(r"--pipeline-model-parallel-layout[=\s]+[\"']?([^\"'\s]+)")
_MOST = 100_000  # letters of a layout with its repeats written out


def megatron_layout(carried: CarriedPlan) -> str:
    """Return the layout string of a plan."""
    layers = carried.sequence.layers
    stages = []
    for start, end in carried.spans:
        letters = ["t" if layers[i].block is not None else "E" if i == 0 else "L" for i in range(start, end)]
        stages.append(
            "".join(f"{letter}*{n}" if (n := len([*run])) > 2 else letter * n for letter, run in groupby(letters))
        )
    return "|".join(stages)


def _write(carried: CarriedPlan) -> str:
    _require_decoder(carried)
    lines = [
        f"--pipeline-model-parallel-size {_ranks(carried)}",
        f'--pipeline-model-parallel-layout "{megatron_layout(carried)}"',
        *_recompute(carried),
    ]
    return "\n".join(lines) + "\n"


def _require_decoder(carried: CarriedPlan) -> None:
    sequence = carried.sequence
    encoders = [name for name in sequence.lists if "encoder" in name.lower().split(".")]
    if len(sequence.lists) > 1 or encoders:
        raise cannot_carry(
            "Megatron's layout",
            f"the model has the lists of blocks {', '.join(sequence.lists)}, and a layout has decoder layers only "
            '("Encoder layer is not supported for flexible pipeline layout")',
            "Export to torch, accelerate or onnx.",
        )
    first, last = sequence.layers[0], sequence.layers[-1]
    if first.block is not None or last.block is not None:
        what = "embedding" if first.block is not None else "head"
        reason = f"the model has no {what}, but a layout has one E at its beginning and one L at its end"
        raise cannot_carry("Megatron's layout", reason, "Capture the model with its embedding and its head.")
    if not sequence.embeds_tokens:
        reason = f"{first.names[0]} is not a token embedding, but E is the embedding of a language model"
        raise cannot_carry("Megatron's layout", reason, "Export to torch, accelerate or onnx.")


def _ranks(carried: CarriedPlan) -> int:
    order, stages = carried.order, carried.stages
    if order is None:
        return stages
    ranks = carried.ranks
    if order.name not in ("1F1B", "Interleaved1F1B") or carried.rank_of != tuple(s % ranks for s in range(stages)):
        raise cannot_carry(
            "Megatron",
            f"it runs 1F1B, or interleaved 1F1B with stage s on rank s mod {ranks}, but not {order.name}",
            "Use --schedule 1f1b or interleaved-1f1b, or export to torch or torchtitan.",
        )
    return ranks


def _recompute(carried: CarriedPlan) -> list[str]:
    """Return the flags for what is computed again.

    They hold for all stages: ``uniform`` checkpoints units of N layers, ``block`` the first N layers of each stage.
    """
    flags = carried.recomputed_blocks
    if not any(carried.recompute):
        return []
    counts, whole = [sum(stage) for stage in flags], all(map(all, flags))
    if whole and not carried.by_stage:
        method, layers = "uniform", 1
    elif len({*counts}) == 1 and counts[0] and (whole or not carried.by_stage):
        method, layers = "uniform" if carried.by_stage else "block", counts[0]
    else:
        raise cannot_carry(
            "Megatron",
            f"its flags recompute the same number of layers in every stage, and the stages have {counts}",
            "Plan stages with equal numbers of recomputed layers, or with recompute in all or none of them.",
        )
    return ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {layers}"]


def _read(text: str) -> StagesInText:
    found = _FLAG.search(text)
    stages = _unrolled(found[1] if found else text.strip().strip("\"'"))
    letters = "".join(stages)
    if not re.fullmatch(r"Et+L", letters):
        what = "multi-token prediction (m)" if "m" in letters else "anything but one E, layers and one L, in this order"
        raise no_such_text("Megatron", f"splitkit reads no layout with {what}", _EXAMPLE)
    if any(not stage for stage in stages):
        raise no_such_text("Megatron", "a stage is empty, and the parts of a plan are not", _EXAMPLE)
    return StagesInText(layers=tuple(map(len, stages)))


def _unrolled(text: str) -> list[str]:
    """Return the letters of each stage, with repeats written out as Megatron does: groups first, then letters."""
    layout = re.sub(r"\s", "", text.replace(",", ""))
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        repeats = [int(n) * len(unit) for unit, n in re.findall(pattern, layout)]
        if sum(repeats) > _MOST:
            raise no_such_text("Megatron", f"it has more than {_MOST} letters", _EXAMPLE)
        layout = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), layout)
    if not layout or not re.fullmatch(r"[EtmL|]+", layout):
        wrong = next((letter for letter in layout if letter not in "EtmL|"), "")
        raise no_such_text("Megatron", f"it has the letter {wrong!r}" if wrong else "it is empty", _EXAMPLE)
    return layout.split("|")


MEGATRON = ExportFormat(
    name="megatron",
    tool="Megatron-LM",
    where="the command line of pretrain_gpt.py, as it is",
    level="ends",
    write=_write,
    read=_read,
    known_by=r"--pipeline-model-parallel-layout|\A\s*[\"']?[EtmL|()*,\d\s]*E[EtmL|()*,\d\s]*[\"']?\s*\Z",
    schedules="name",
    recompute=True,
    ties="ends",
    example=_EXAMPLE,
)
