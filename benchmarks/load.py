"""The peak memory of loading weights beside transformers and accelerate: ``--json`` for machines.

A checkpoint of a Llama with random weights is written shard by shard, and each way of loading runs in a process of its
own. ``peak`` is what the process grows by while it loads (``VmHWM``, reset before; mapped pages of files that it has
touched count), ``ratio`` is the peak over the bytes of the weights that it keeps.

stage         one stage: ``open_stages(stages, weights=folder).load([0])``, as a rank does
devices       all stages in one process: ``splitkit.load(split, folder, devices)``
converted     the same, from bfloat16 files to a float32 model
transformers  ``from_pretrained``, the whole model: it maps the files, and pages that it has not read do not count
accelerate    ``load_checkpoint_and_dispatch``: the first layers on the CPU, the others offloaded; if it is installed

``--layers 24 --hidden 4096 --vocab 32000 --stages 4 --only stage`` reads one stage of four from ten gigabytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import splitkit as sk
from splitkit.engine.split import Split
from splitkit.runtime import open_stages, save_stages
from splitkit.runtime.folder.tensorfiles import write_tensors

WAYS = ("stage", "devices", "converted", "transformers", "accelerate")
INDEX = "model.safetensors.index.json"


def config_of(args: argparse.Namespace) -> Any:
    """The configuration of a Llama."""
    return transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(args.hidden // 128, 1),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def model_on_meta(args: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A Llama without data."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config_of(args)).to(dtype).eval()


def split_of(args: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> Split:
    """The model's graph in stages, planned on meta."""
    ids = torch.zeros(1, 16, dtype=torch.long)
    gm = sk.capture(model_on_meta(args, dtype), input_ids=ids, use_cache=False)
    return sk.split(gm, sk.policies.Stages(args.stages))


def digest(tensor: torch.Tensor) -> int:
    """A number that depends on every element."""
    return int(tensor.detach().view(torch.int16).sum(dtype=torch.int64))


def write_checkpoint(args: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Write random weights, a shard for each layer; return name -> its digest."""
    model = model_on_meta(args)
    model.config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, like in model.state_dict().items():
        number = re.search(r"layers\.(\d+)\.", name)
        shards.setdefault(f"layer{number[1]}" if number else name.split(".")[-2], {})[name] = like
    digests: dict[str, int] = {}
    where: dict[str, str] = {}
    for shard, likes in shards.items():
        # Bits of positive numbers from 0.008 to 2.
        made = {
            name: torch.randint(0x3C00, 0x3FFF, like.shape, dtype=torch.int16).view(torch.bfloat16)
            for name, like in likes.items()
        }
        write_tensors(folder / f"{shard}.safetensors", made)
        digests |= {name: digest(tensor) for name, tensor in made.items()}
        where |= dict.fromkeys(made, f"{shard}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return digests


def peak_bytes() -> int:
    """The most memory that this process has had since the last reset."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def by_stage(args: argparse.Namespace, folder: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """One stage, as a rank loads it."""
    held = open_stages(folder / "stages", weights=folder)
    yield {}
    held.load([args.stages // 2])
    yield {held.qualified_names.get(n, n): t for n, t in held.module.state_dict().items() if not t.is_meta}


def by_devices(args: argparse.Namespace, folder: Path, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
    """All stages, each on a device of its own."""
    split = split_of(args, dtype)
    yield {}
    yield sk.load(split, folder, [f"cpu:{i}" for i in range(args.stages)], dtype=dtype).state_dict()


def by_transformers(args: argparse.Namespace, folder: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """The whole model."""
    yield {}
    yield transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()


def by_accelerate(args: argparse.Namespace, folder: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """The first layers on the CPU, the others left on disk."""
    import accelerate

    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(config_of(args)).to(torch.bfloat16)
    first = args.layers // args.stages
    place = {"model.embed_tokens": "cpu", **{f"model.layers.{i}": "cpu" for i in range(first)}}
    place |= {f"model.layers.{i}": "disk" for i in range(first, args.layers)}
    place |= {"model.norm": "disk", "lm_head": "disk", "model.rotary_emb": "cpu"}
    yield {}
    made = accelerate.load_checkpoint_and_dispatch(model, folder, place, offload_folder=folder / "offload")
    yield {name: t for name, t in made.state_dict().items() if not t.is_meta}


def measure(args: argparse.Namespace, folder: Path, way: str) -> dict[str, Any]:
    """Load in this process."""
    makers: dict[str, Callable[[], Iterator[Mapping[str, torch.Tensor]]]] = {
        "stage": lambda: by_stage(args, folder),
        "devices": lambda: by_devices(args, folder, torch.bfloat16),
        "converted": lambda: by_devices(args, folder, torch.float32),
        "transformers": lambda: by_transformers(args, folder),
        "accelerate": lambda: by_accelerate(args, folder),
    }
    steps = makers[way]()
    next(steps)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_bytes(), time.perf_counter()
    held = next(steps)
    seconds, grown = time.perf_counter() - start, peak_bytes() - before
    kept = sum({t.data_ptr(): t.nbytes for t in held.values()}.values())
    digests = json.loads((folder / "digests.json").read_text())
    for name, tensor in held.items():
        # Conversion to float32 and back is exact.
        assert name not in digests or digest(tensor.bfloat16()) == digests[name], name
    assert sum(name in digests for name in held) > 1
    return {"way": way, "kept": kept, "peak": grown, "ratio": grown / kept, "seconds": seconds}


def main() -> None:
    """Write a checkpoint, load it in every way, delete it, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--only", choices=WAYS, nargs="*", default=WAYS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args, Path(args.child[1]), args.child[0])))
        return
    ways = [way for way in args.only if way != "accelerate" or find_spec("accelerate")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digests.json").write_text(json.dumps(write_checkpoint(args, folder)))
        save_stages(split_of(args), folder / "stages")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        rows = []
        for way in ways:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", way, name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                raise SystemExit(run.stderr)
            rows.append(json.loads(run.stdout.splitlines()[-1]))
    if args.json:
        print(json.dumps({"checkpoint": size, "stages": args.stages, "rows": rows}))
        return
    table = Table(
        "way", "kept, MB", "peak, MB", "ratio", title=f"a checkpoint of {size / 1e6:.0f} MB, {args.stages} stages"
    )
    for row in rows:
        table.add_row(row["way"], f"{row['kept'] / 1e6:.0f}", f"{row['peak'] / 1e6:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
