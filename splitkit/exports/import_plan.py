"""Read stages that another tool runs today as a plan of a captured graph, to price, draw and explain it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import Costs, default
from splitkit.costs.recorded import record_of
from splitkit.errors import FileError, listed, nearest
from splitkit.exports.carried_plan import (
    CarriedPlan,
    Layer,
    LayerSequence,
    StagesInText,
    cannot_carry,
    layer_sequence,
    outer_modules,
)
from splitkit.exports.deepspeed import DEEPSPEED
from splitkit.exports.device_maps import ACCELERATE, TRANSFORMERS
from splitkit.exports.export_format import TORCH, ExportFormat, no_such_text, whole_numbers
from splitkit.exports.galvatron import GALVATRON
from splitkit.exports.megatron import MEGATRON
from splitkit.exports.nnscaler import NNSCALER
from splitkit.exports.onnx_stages import ONNX
from splitkit.exports.torchtitan import TORCHTITAN, titan_names
from splitkit.graph.dataflow import Dataflow, facts_of, module_path
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.prices import require_costs

# The formats of vLLM and SGLang: how many layers each rank has, in an environment variable.
#
# Read: ``get_pp_indices`` in vllm-project/vllm ``vllm/distributed/utils.py`` and sgl-project/sglang
# ``python/sglang/srt/distributed/utils.py`` (1107be1): as many numbers as ranks, their sum the number of layers. The
# embedding is on the first rank, norm and head on the last.


def _write(tool: str, variable: str, flag: str, carried: CarriedPlan) -> str:
    if len(carried.sequence.lists) > 1:
        raise cannot_carry(
            tool,
            f"the model has the lists of blocks {', '.join(carried.sequence.lists)}, and {variable} counts one list",
            "Export to accelerate or torch.",
        )
    numbers = ",".join(map(str, carried.blocks))
    return f'export {variable}="{numbers}"\n# {flag} {carried.stages}\n'


def _read(tool: str, variable: str, text: str) -> StagesInText:
    found = re.search(rf"{variable}\s*=\s*[\"']?([0-9, ]+)", text)
    numbers = whole_numbers(found[1] if found else text)
    example = f'{variable}="9,8,8,7"'
    if numbers is None:
        raise no_such_text(tool, "it has no list of numbers of layers", example)
    if 0 in numbers:
        raise no_such_text(tool, "a rank has no layer, and the parts of a plan are not empty", example)
    return StagesInText(layers=numbers)


def _format(name: str, tool: str, variable: str, flag: str) -> ExportFormat:
    return ExportFormat(
        name=name,
        tool=tool,
        where=f"the environment of every rank, next to {flag}",
        level="blocks",
        write=partial(_write, tool, variable, flag),
        read=partial(_read, tool, variable),
        known_by=rf"{variable}",
        ties="ends",
        use="serving",
        example=f'{variable}="9,8,8,7"',
    )


VLLM = _format("vllm", "vLLM", "VLLM_PP_LAYER_PARTITION", "vllm serve MODEL --pipeline-parallel-size")
SGLANG = _format("sglang", "SGLang", "SGLANG_PP_LAYER_PARTITION", "python -m sglang.launch_server --pp-size")


FORMATS: Mapping[str, ExportFormat] = {
    one.name: one
    for one in (
        TORCH,
        TORCHTITAN,
        MEGATRON,
        DEEPSPEED,
        ACCELERATE,
        TRANSFORMERS,
        VLLM,
        SGLANG,
        GALVATRON,
        NNSCALER,
        ONNX,
    )
}


def format_named(name: object) -> ExportFormat:
    """Return the format of a name, in any case.

    Raises:
        FileError: SK521 if there is none; lists them.
    """
    found = FORMATS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        known = f"Known: {', '.join(FORMATS)}."
        remedy = nearest(name, FORMATS, known) if isinstance(name, str) else known
        raise FileError("SK521", f"no export format is called {name!r:.80}", remedy)
    return found


def format_of(text: str) -> ExportFormat:
    """Return the format of a text, by what only its texts have.

    Raises:
        FileError: SK521 if it looks like the text of no format, or of several.
    """
    fits = [one for one in FORMATS.values() if re.search(one.known_by, text)]
    if len(fits) != 1:
        like = f"of {listed([one.name for one in fits], 3)}" if fits else "of no format"
        raise FileError("SK521", f"the text looks like one {like}", f"Name it with form=: {', '.join(FORMATS)}.")
    return fits[0]


# The formats that `splitkit.export` writes and `splitkit.import_plan` reads, by name.


def import_plan(gm: fx.GraphModule, text: str, *, form: str | None = None, costs: Costs | None = None) -> Plan:
    """Return the plan that another tool's text describes, with the stages ``0 .. n - 1``.

    The plan has no claim. `splitkit.report`, `splitkit.stage_costs`, `splitkit.simulate_schedule` and `Plan.view` say
    what it costs, and `splitkit.export` writes it in another format.

    Args:
        gm: the graph of the model, captured by splitkit.
        text: a layout, device map, list of modules, JSON ... as the tool reads it.
        form: the format, as in `splitkit.export`; by default it is recognised from the text.
        costs: the prices that the plan records; by default FLOPs.

    Raises:
        FileError: SK521 for an unknown format, SK524 for a text in a different format, SK525 if the text does not match
            the model: a different number of layers, or an unknown module.
        PlanError: SK522 if the model has no list of blocks.
    """
    if not isinstance(text, str):
        raise FileError(
            "SK524", f"the text is a {type(text).__name__}", "Give the text itself, or read the file first."
        )
    chosen = format_of(text) if form is None else format_named(form)
    flow = facts_of(gm)
    used = default(flow) if costs is None else require_costs(costs)
    found = chosen.read(text)
    plan = _plan(chosen, flow, used, found)
    return replace(plan, prices=record_of(used, flow))


def _plan(form: ExportFormat, flow: Dataflow, costs: Costs, found: StagesInText) -> Plan:
    note = f"as {form.tool} runs it"
    if found.nodes is not None:
        return Plan.of(_stages_of_nodes(form, flow, found.nodes), note)
    sequence = layer_sequence(flow, costs, form.level)
    cuts = _cuts(form, sequence, found)
    plan = sequence.plan(cuts, f"{note}: {_summary(sequence, cuts)}")
    again = _checkpointed(form, sequence, cuts, found.recompute)
    parts, named = dict[PartKey, Part](), found.devices
    for stage, start in enumerate([0, *cuts]):
        device = None if named is None else _device(form, _device_of(form, sequence.layers[start], named))
        parts[stage] = Part(stage, device, "checkpoint" if again[stage] else "plain")
    return replace(plan, parts=parts)


def _summary(sequence: LayerSequence, cuts: Sequence[int]) -> str:
    if sequence.level == "modules":
        return f"cut before {', '.join(sequence.layers[cut].names[0] for cut in cuts)}"
    return f"{', '.join(map(str, sequence.blocks_of(cuts)))} layers in each stage"


def _misfit(form: ExportFormat, reason: str, remedy: str) -> FileError:
    return FileError("SK525", f"the text for {form.tool} does not fit the model: {reason}", remedy)


def _cuts(form: ExportFormat, sequence: LayerSequence, found: StagesInText) -> tuple[int, ...]:
    """Return the cuts of a text, after checking that the graph can be cut there."""
    if found.layers is not None:
        cuts = _after_layers(form, sequence, found.layers)
    elif found.starts is not None:
        cuts = _at_modules(form, sequence, found.starts)
    elif found.devices is not None:
        cuts = _between_devices(form, sequence, found.devices)
    else:
        cuts = _between_modules(form, sequence, found.modules or ())
    bad = [cut for cut in cuts if cut not in sequence.borders]
    if bad:
        before, behind = (", ".join(sequence.layers[i].names) for i in (bad[0] - 1, bad[0]))
        raise _misfit(
            form,
            f"the graph cannot be cut between {before} and {behind}, which wait for each other or share memory",
            "Cut elsewhere.",
        )
    return cuts


def _after_layers(form: ExportFormat, sequence: LayerSequence, counts: Sequence[int]) -> tuple[int, ...]:
    total = len(sequence.layers)
    if sum(counts) != total:
        names = ", ".join("+".join(layer.names) for layer in sequence.layers[:3])
        reason = f"{' + '.join(map(str, counts))} = {sum(counts)} layers, and the model has {total}"
        raise _misfit(form, reason, f"They are {names} ...")
    return tuple(accumulate(counts[:-1]))


def _at_modules(form: ExportFormat, sequence: LayerSequence, starts: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
    """Return the cuts before modules, or after them, in the order in which they run."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, layer in enumerate(sequence.layers):
        for node in layer.nodes:
            for name in outer_modules(module_path(node)):
                first.setdefault(name, i)
                last[name] = i
    cuts = []
    for name, after in starts:
        if name not in first:
            raise _misfit(
                form, f"it names {name!r}, which runs nowhere", nearest(name, first, "Name a module that runs.")
            )
        at = last[name] + 1 if after else first[name]
        own = sequence.layers[first[name]]
        if not after and name not in own.names and not _begins(own, name):
            raise _misfit(
                form,
                f"{name} begins inside {own.names[0]}, where no cut can be named",
                "Name a module that runs once, and whose first op is the first of a module.",
            )
        if not 0 < at < len(sequence.layers):
            raise _misfit(form, f"a cut at {name} leaves a stage without layers", "Name a module in the middle.")
        cuts.append(at)
    if len({*cuts}) < len(cuts):
        raise _misfit(form, "two cuts are at the same place", "Name one module for each cut.")
    return tuple(sorted(cuts))


def _begins(layer: Layer, name: str) -> bool:
    """Whether the first node of a layer is the first of a module."""
    path = module_path(layer.nodes[0])
    return path == name or path.startswith(f"{name}.")


def _between_modules(form: ExportFormat, sequence: LayerSequence, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the cuts between lists of modules; a module may stand for all that it contains."""
    names = titan_names(sequence) if form.name == "torchtitan" else {}
    wanted = {name: stage for stage, modules in enumerate(stages) for name in modules}
    often = [name for name in wanted if sum(name in modules for modules in stages) > 1]
    for name in often:
        if not any(names.get(own, own) == name for layer in sequence.layers for own in layer.names):
            wanted.pop(name)  # a module that every stage has, such as rotary tables
    if often and any(name in wanted for name in often):
        raise _misfit(form, f"{next(n for n in often if n in wanted)} is in several stages", "Name it once.")
    own = [name for layer in sequence.layers for name in layer.names]  # one of each layer
    stage_of = [wanted[_nearest_parent(form, names.get(name, name), wanted)] for name in own]
    if stage_of != sorted(stage_of):
        later = next(i for i in range(1, len(stage_of)) if stage_of[i] < stage_of[i - 1])
        name = sequence.layers[later].names[0]
        raise _misfit(
            form, f"{name} runs after a module of a later stage", "Stages must follow the order of the modules."
        )
    if missing := sorted({*range(len(stages))} - {*stage_of}):
        raise _misfit(form, f"stage {missing[0]} ({', '.join(stages[missing[0]][:3])}) runs nothing", "Leave it out.")
    return tuple(i for i in range(1, len(stage_of)) if stage_of[i] != stage_of[i - 1])


def _between_devices(form: ExportFormat, sequence: LayerSequence, devices: Mapping[str, str]) -> tuple[int, ...]:
    """Return the cuts at which the device changes from one layer to the next."""
    known = {name for key in sequence.flow.root.state_dict() for name in outer_modules(key)}
    known |= {name for node in sequence.flow.nodes for name in outer_modules(module_path(node))}
    if strange := next((name for name in devices if name and name not in known), None):
        raise _misfit(
            form, f"the model has no module {strange!r}", nearest(strange, known, "Name modules of the model.")
        )
    own = [_device_of(form, layer, devices) for layer in sequence.layers]
    cuts = tuple(i for i in range(1, len(own)) if own[i] != own[i - 1])
    if not cuts:
        raise _misfit(form, f"all layers are on {own[0]}", "A plan has a part for each of two devices or more.")
    return cuts


def _device_of(form: ExportFormat, layer: Layer, devices: Mapping[str, str]) -> str:
    return devices[_nearest_parent(form, layer.names[0], devices)]


def _nearest_parent(form: ExportFormat, name: str, wanted: Mapping[str, object]) -> str:
    """Return the named module that a module is or is in."""
    outer = next((outer for outer in reversed(["", *outer_modules(name)]) if outer in wanted), None)
    if outer is not None:
        return outer
    if inside := next((other for other in wanted if other.startswith(f"{name}.")), None):
        raise _misfit(form, f"it divides {name}, of which it names {inside}", "Give the whole of it one place.")
    raise _misfit(form, f"it gives {name} no stage", nearest(name, wanted, "List every module."))


def _stages_of_nodes(form: ExportFormat, flow: Dataflow, stages: Mapping[str, int]) -> dict[Node, Any]:
    known = {node.name: node for node in flow.nodes}
    if strange := next((name for name in stages if name not in known), None):
        raise _misfit(form, f"the graph has no node {strange!r}", "Capture the model as it was for the export.")
    if missing := next((name for name in known if name not in stages), None):
        raise _misfit(form, f"the node {missing!r} has no stage", "Export the plan again.")
    return {known[name]: stage for name, stage in stages.items()}


def _checkpointed(
    form: ExportFormat, sequence: LayerSequence, cuts: Sequence[int], flags: Sequence[bool]
) -> list[bool]:
    """Return stage -> whether it is recomputed, from a flag for each block."""
    if not flags:
        return [False] * (len(cuts) + 1)
    left, found = list(flags), []
    for stage, count in enumerate(sequence.blocks_of(cuts)):
        own, left = set(left[:count]), left[count:]
        if len(own) > 1:
            raise _misfit(
                form,
                f"stage {stage} recomputes some of its layers, and a part of a plan is recomputed as a whole",
                "Set the flags of its layers alike.",
            )
        found.append(own == {True})
    return found


def _device(form: ExportFormat, name: str) -> torch.device | None:
    """Return a device of a device map; none for ``"disk"``, from where weights are loaded when they are needed."""
    if name == "disk":
        return None
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _misfit(form, f"{name!r} is not a device", "Name devices as torch does: cuda:0, cpu.") from error
