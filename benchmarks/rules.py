"""How other tools place a model on devices: their published rules, written down anew, as plans of a graph.

equal layers  equally many blocks each, the first stages one more: `splitkit.policies.Expert`
accelerate    ``infer_auto_device_map`` within ``get_balanced_memory``, as for ``device_map="balanced"`` of transformers
              (huggingface/accelerate 1.15.0, ``utils/modeling.py``): bytes of parameters, greedily, in module order
deepspeed     ``PipelineModule(partition_method="parameters")`` (deepspeedai/DeepSpeed, ``partition_balanced`` of
              ``runtime/utils.py``): numbers of parameters, the largest part less the smallest as small as possible
vllm          ``get_pp_indices`` (vllm-project/vllm, ``distributed/utils.py``): equally many blocks, the remainder one
              each to the stages before the last
sglang        ``get_pp_indices`` (sgl-project/sglang, ``srt/distributed/utils.py``): equally many blocks, the remainder
              one each to the last stages
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

from torch import nn
from torch.fx import Node

from splitkit.costs import Costs, unit
from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import Dataflow, module_path, readers_of, waits_for
from splitkit.plans.record import Plan
from splitkit.policies import Expert
from splitkit.search.placement_model import PlacementModel

Named = tuple[str, object]
"""A module, parameter or buffer, and its dotted name."""


def equal_layers(flow: Dataflow, model: nn.Module, count: int, costs: Costs) -> Plan:
    """Equally many blocks."""
    return Expert(count).assign(flow, costs)


def vllm(flow: Dataflow, model: nn.Module, count: int, costs: Costs) -> Plan:
    """vLLM's default."""
    return _counted(flow, model, count, costs, middle_heavy)


def sglang(flow: Dataflow, model: nn.Module, count: int, costs: Costs) -> Plan:
    """SGLang's default: the remainder goes to the last stages."""
    return _counted(flow, model, count, costs, end_heavy)


def _counted(flow: Dataflow, model: nn.Module, count: int, costs: Costs, rule: Callable[[int, int], list[int]]) -> Plan:
    """Numbers of blocks, by a rule."""
    blocks = [name for name, _ in layers_of(flow, model) if name.rpartition(".")[2].isdecimal()]
    if len(blocks) < count:
        raise NoPlanError("SK303", f"{count} stages of {len(blocks)} blocks", "Ask for fewer.")
    begins = accumulate(rule(len(blocks), count)[:-1])
    return Expert([blocks[before] for before in begins]).assign(flow, costs)


def accelerate(flow: Dataflow, model: nn.Module, count: int, costs: Costs) -> Plan:
    """Accelerate's device map.

    Modules that hold nothing bind nothing: a dropout that an encoder has behind its blocks, and calls before them too.
    """
    devices = device_map(model, balanced_memory(model, count))
    weighty = {name for name, module in model.named_modules() if [*module.parameters(), *module.buffers()]}
    return placed(flow, {name: device for name, device in devices.items() if name in weighty})


def accelerate_within(flow: Dataflow, model: nn.Module, limits: Sequence[float]) -> Plan:
    """Accelerate's device map with ``max_memory``: each device is filled before the next one."""
    devices = device_map(model, limits)
    weighty = {name for name, module in model.named_modules() if [*module.parameters(), *module.buffers()]}
    return placed(flow, {name: device for name, device in devices.items() if name in weighty})


def deepspeed(flow: Dataflow, model: nn.Module, count: int, costs: Costs) -> Plan:
    """DeepSpeed's stages; a layer is a block, or a module outside of them. Tied parameters count in each layer."""
    layers = layers_of(flow, model)
    weights = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for _, layer in layers]
    starts = narrowest(weights, count)
    return placed(flow, {name: bisect_right(starts, i) - 1 for i, (name, _) in enumerate(layers)})


RULES: Mapping[str, Callable[[Dataflow, nn.Module, int, Costs], Plan]] = {
    "equal layers": equal_layers,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "vllm": vllm,
}
SERVING: Mapping[str, Callable[[Dataflow, nn.Module, int, Costs], Plan]] = {
    **{name: rule for name, rule in RULES.items() if name != "deepspeed"},
    "sglang": sglang,
}
"""The rules of tools that serve models."""


def placed(flow: Dataflow, devices: Mapping[str, int]) -> Plan:
    """Each node on the device of its innermost module that has one; other nodes on that of their first reader.

    So are masks and tables: what depends on inputs and constants alone, whatever module it is of (accelerate has
    Llama's rotary tables on the last device, and sends them to all).

    The stages of a pipeline run one after the other: a node that reads what a later device makes goes there. So does
    a head that is tied to the embedding on the first device, to which accelerate would send the values back.
    """
    stage: dict[Node, int] = {}
    free = set(PlacementModel(flow, unit(flow.root), [dict.fromkeys(flow.nodes, 0.0)], repeat=True).shared)
    for node in flow.nodes:
        own = None if node in free else _device_of(module_path(node), devices)
        if own is None:
            free.add(node)
        stage[node] = max(own or 0, *(stage[before] for before in waits_for(flow, node)), 0)
    later: dict[Node, list[Node]] = {node: list(readers) for node, readers in readers_of(flow).items()}
    for node in flow.nodes:
        for before in flow.after.get(node, ()):
            if before in later:
                later[before].append(node)
    for node in reversed(flow.nodes):
        if node in free and later[node]:
            stage[node] = min(stage[reader] for reader in later[node])
    return Plan.of(stage)


def _device_of(path: str, devices: Mapping[str, int]) -> int | None:
    while path and path not in devices:
        path = path.rpartition(".")[0]
    return devices.get(path)


def layers_of(flow: Dataflow, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that one would list for a pipeline, as they run: blocks whole, and what is outside of blocks.

    Blocks are what the model does not want split, and the members of lists of modules.
    """
    first: dict[str, int] = {}
    for node in flow.nodes:
        path = module_path(node)
        while path:
            first.setdefault(path, flow.index[node])
            path = path.rpartition(".")[0]
    found, todo = [], list(model.named_children())
    while todo:
        name, module = todo.pop()
        listed = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList)
        if listed or type(module).__name__ in _modules_to_share(model) or not list(module.children()):
            found.append((name, module))
        else:
            todo += [(f"{name}.{child}", of) for child, of in module.named_children()]
    return sorted((layer for layer in found if layer[0] in first), key=lambda layer: first[layer[0]])


def middle_heavy(blocks: int, count: int) -> list[int]:
    """How many blocks vLLM gives each stage."""
    counts = [blocks // count] * count
    for i in range(blocks % count):
        counts[-2 - i] += 1
    return counts


def end_heavy(blocks: int, count: int) -> list[int]:
    """How many blocks SGLang gives each stage."""
    return [blocks // count + (stage >= count - blocks % count) for stage in range(count)]


def narrowest(weights: Sequence[float], count: int) -> list[int]:
    """Where each part starts, such that the heaviest part less the lightest is least as far as DeepSpeed's DP sees.

    It keeps one plan for each prefix and number of parts, the narrowest, the last of equal ones.
    """
    n = len(weights)
    if n <= count:
        return list(range(n))
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {(0, 0): (0.0, 0.0, math.inf, 0)}
    for end in range(1, n + 1):
        for parts in range(1, min(end, count) + 1):
            options = []
            for start in range(parts - 1, end):
                if (start, parts - 1) in best:
                    _, most, least, _ = best[start, parts - 1]
                    own = total[end] - total[start]
                    most, least = max(most, own), min(least, own)
                    options.append((most - least, most, least, -start))
            if options:
                best[end, parts] = min(options, key=lambda option: (option[0], option[3]))
    starts, end = [], n
    for parts in range(count, 0, -1):
        end = -best[end, parts][3]
        starts.append(end)
    return starts[::-1]


def balanced_memory(model: nn.Module, count: int) -> list[float]:
    """Bytes that accelerate allows each device: the mean and a buffer; the last device has no limit."""
    sizes = _sizes(model)
    modules = set(sizes).difference(_without_children(sizes))  # what has no children there are tensors
    leaves = _without_children(modules)
    mean = sum(sizes[name] for name in leaves) // max(1, len(leaves))
    blocks: dict[str, int] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name in sizes and kind in _modules_to_share(model):
            blocks.setdefault(kind, sizes[name])  # the first of each class
    buffer = int(1.25 * max(mean, *blocks.values(), 0))
    return [float(sizes[""] // count + buffer)] * (count - 1) + [math.inf]


def device_map(model: nn.Module, memory: Sequence[float]) -> dict[str, int]:
    """Names of modules and parameters -> the device that accelerate puts them on.

    The first device keeps room for the largest layer that is still to be placed. Modules that are tied are placed
    together, if need be split until that fits.
    """
    sizes, whole, ties = _sizes(model), _modules_to_share(model), _ties(model)
    todo: list[Named] = [
        *model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)
    ]  # fmt: skip
    found: dict[str, int] = {}
    device, used = 0, 0
    while todo:
        name, module = todo.pop(0)
        limit = memory[device] - (_largest(todo, sizes, whole) if device == 0 else 0)
        tied = _tied_to(name, ties, todo)
        need = sizes[name] + sum(sizes[todo[i][0]] - sizes[parameter] for parameter, i in tied)
        if used + need <= limit:
            used += need
            names = {todo[i][0] for _, i in tied}
            found |= dict.fromkeys((name, *sorted(names)), device)
            todo = [item for item in todo if item[0] not in names]
            continue
        if tied and used + sizes[name] <= limit:
            place = next((i for _, i in tied if _splits(todo[i][1], whole)), None)
            if place is not None:
                todo = [(name, module), *todo[:place], *_inside(*todo[place]), *todo[place + 1 :]]
                continue
        if used + sizes[name] >= limit and _splits(module, whole):
            todo = [*_inside(name, module), *todo]
            continue
        device, used = device + 1, 0
        todo.insert(0, (name, module))
    return found


def _modules_to_share(model: nn.Module) -> Collection[str]:
    """Names of classes."""
    return getattr(model, "_no_split_modules", None) or ()


def _sizes(model: nn.Module) -> Counter[str]:
    """Bytes of the parameters and buffers in each module and of each of them; what is tied counts once."""
    sizes: Counter[str] = Counter()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        atoms = name.split(".")
        for end in range(len(atoms) + 1):
            sizes[".".join(atoms[:end])] += tensor.numel() * tensor.element_size()
    return sizes


def _without_children(names: Collection[str]) -> list[str]:
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of the same parameter, where it has several."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def _tied_to(name: str, ties: Sequence[Sequence[str]], todo: Sequence[Named]) -> list[tuple[str, int]]:
    """What is tied to something in a module, outside of it: each parameter, and the item of ``todo`` that has it."""
    groups = [group for group in ties if any(_is_in(parameter, name) for parameter in group)]
    outside = [parameter for group in groups for parameter in group if not _is_in(parameter, name)]
    return [(p, i) for p in outside for i, (other, _) in enumerate(todo) if p.startswith(f"{other}.")]


def _is_in(parameter: str, module: str) -> bool:
    return f"{parameter}.".startswith(f"{module}.")


def _splits(module: object, whole: Collection[str]) -> bool:
    return isinstance(module, nn.Module) and type(module).__name__ not in whole and any(True for _ in module.children())


def _inside(name: str, module: object) -> list[Named]:
    """The parameters and modules in a module."""
    assert isinstance(module, nn.Module)
    own = (*module.named_parameters(recurse=False), *module.named_children())
    return [(f"{name}.{child}", of) for child, of in own]


def _largest(todo: Sequence[Named], sizes: Mapping[str, int], whole: Collection[str]) -> int:
    """Bytes of the largest layer: a module without children, or one that is not split."""
    most, left = 0, list(todo)
    while left:
        name, module = left.pop()
        if isinstance(module, nn.Module) and _splits(module, whole):
            left += [(f"{name}.{child}", of) for child, of in module.named_children()]
        elif isinstance(module, nn.Module):
            most = max(most, sizes[name])
    return most
