"""Defines the arguments of every command; imports no torch, so that ``--help`` is fast."""

from __future__ import annotations

import argparse

from splitkit import __version__
from splitkit.cli.syntax.options import (
    MODEL_HELP,
    Commands,
    HelpFormatter,
    Parser,
    above_zero,
    add_costs,
    add_flag,
    add_links,
    add_model_of_plan,
    add_model_options,
    add_number,
    add_optimizer,
    add_plan_or_model,
    add_plan_target,
    add_policy_options,
    add_recompute,
    add_size,
    add_training,
    add_view,
    command,
    natural,
    numbers,
    positive,
    sizes,
    words,
)
from splitkit.exports.format_list import WRITES
from splitkit.pipeline.schedules import USUAL_MICROBATCHES, known_schedules, words_of

BACKENDS = ("inductor", "aot_eager")
SHELLS = ("bash", "zsh", "fish")

EPILOG = """exit codes:
  0 success   1 error   2 wrong usage   3 no plan fits   4 the split differs from the unsplit model   130 interrupted

example:
  splitkit plan gpt2 --stages 4 -o plan.json && splitkit run plan.json --check"""


def make_parser() -> Parser:
    """Return the parser of ``splitkit``."""
    parser = Parser(
        prog="splitkit",
        description="Split PyTorch models into parts, and check that the parts compute what the whole model computes.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"splitkit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _capture(commands)
    _plan(commands)
    add_fit(commands)
    _split(commands)
    add_export(commands)
    _run(commands)
    _train(commands)
    add_generate(commands)
    _profile(commands)
    _view(commands)
    add_explain(commands)
    add_compare(commands)
    _sweep(commands)
    add_synthesize(commands)
    _devices(commands)
    _completion(commands)
    command(commands, "policies", "list the policies that --policy knows", "splitkit policies --json")
    _doctor(commands)
    return parser


def _doctor(commands: Commands[Parser]) -> None:
    example = "splitkit doctor\nsplitkit doctor --device cuda -o here.json\nsplitkit doctor --device cuda:0,cuda:1"
    what = "check the installation on a tiny model; or, with --device, what splitkit does on a device"
    parser = command(commands, "doctor", what, example)
    parser.add_argument(
        "--device",
        "--devices",
        metavar="DEVICE",
        help="compare numbers, memory and times on this device, or two (cuda:0,cuda:1), with the plans; a few minutes",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write what was found as JSON")


def _capture(commands: Commands[Parser]) -> None:
    example = "splitkit capture gpt2 --size layers=4,width=256,heads=4\nsplitkit capture my_model.py:make"
    parser = command(commands, "capture", "capture a model as a graph and describe it", example)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_model_options(parser)


def _plan(commands: Commands[Parser]) -> None:
    example = (
        "splitkit plan gpt2 --stages 4 -o plan.json\n"
        "splitkit plan gpt2 --policy \"ByName({'transformer.h.[0-5]': 0, 'transformer.h.*': 1})\"\n"
        "splitkit plan llama --policy \"AroundOps(['aten.scaled_dot_product_attention'])\"\n"
        "splitkit plan gpt2 --devices 4xh200 --schedule 1f1b --microbatches 8 --trace timeline.json -o plan.json\n"
        "splitkit plan gpt2 --devices 8xh200 --schedule 1f1b --replicas 1,2,4\n"
        "splitkit plan llama --devices h200,h200,a100 --objective latency\n"
        "splitkit plan gpt2 --stages 2 --mesh tp=2 -o plan.json && splitkit train plan.json --nproc 4 --check\n"
        "splitkit plan gpt2 --what fwd-bwd --memory 2GiB -o step.json && splitkit run step.json --check"
    )
    parser = command(commands, "plan", "decide which part computes which node", example)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    _add_parts(parser.add_argument_group("parts"))
    _add_limits(parser.add_argument_group("devices (with --devices or --stages)"))
    step = parser.add_argument_group("training step (with --devices or --stages)")
    _add_step(step)
    step.add_argument(
        "--mesh",
        metavar="tp=N",
        help="shard each stage over N ranks as well (tensor parallelism), or tp=N:LINK with the link between them; the "
        "plan is of a training step, one rank's share (fwd-bwd). A factory may take the mesh: def make(mesh)",
    )
    add_import(parser)
    prices = parser.add_argument_group("prices")
    add_costs(prices, "flops; with --devices their roofline; with fwd-bwd roofline:a100")
    add_training(prices)
    add_model_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON (- for standard output)")
    add_view(output, "the plan, as splitkit view draws it")
    output.add_argument("--trace", metavar="FILE", help="with --schedule: write the timeline for Perfetto")
    output.add_argument(
        "--order",
        metavar="FILE.csv",
        help="with --schedule: order the messages for the shortest step that cannot deadlock, and write actions and "
        "messages of each rank in torch's format, for splitkit train --schedule FILE.csv",
    )


def _add_parts(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    add_number(one, "--stages", "N pipeline stages")
    group.add_argument(
        "--devices",
        metavar="LIST",
        help="plan for these devices: 4xh200, or h200,h200,a100, or FILE.toml (see `splitkit devices --help`); "
        "devices of one kind become stages of a pipeline",
    )
    one.add_argument("--policy", metavar="EXPR", help="a policy with its parameters; `splitkit policies` lists them")
    group.add_argument(
        "--what",
        choices=("parts", "fwd-bwd"),
        default="parts",
        help="split the forward into parts (default), or divide a training step into forward and backward",
    )
    group.add_argument(
        "--on-cycle",
        choices=("error", "refine", "merge"),
        help="if parts depend on each other in a cycle: refuse (default), call them several times, or merge them",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add_size(
        group,
        "--memory",
        "memory limit of each device: 80GiB; 24GiB,16GiB for two devices; 80%% of its memory; or least for the "
        "lowest possible peak (default: all of its memory); with fwd-bwd, a limit on the peak: 2GiB, 50%% of what can "
        "be saved, or least; with fwd-bwd and --optimizer, the memory of the card, 5%% of which stays free: 24GiB",
    )
    add_links(group)
    group.add_argument(
        "--objective",
        choices=("throughput", "latency", "tokens"),
        help="minimize the load of the busiest device (default) or the time of one sample; or, for inference, leave "
        "room for the largest KV cache",
    )
    add_number(group, "--tokens", "for inference: leave room for a KV cache of N tokens, over all requests in flight")
    add_number(
        group,
        "--chunk",
        "with --how decoder and room for tokens: largest number of new tokens per step, over all requests "
        "(default: one of each)",
    )


def _add_step(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{words_of()}, or FILE.py:NAME for a schedule of your own; the step is simulated (default: inference, "
        "one sample after another)",
    )
    add_number(
        group,
        "--microbatches",
        "number of microbatches in a step, each of the captured batch size (default: 2 per stage)",
    )
    group.add_argument(
        "--replicas",
        type=numbers,
        metavar="LIST",
        help="numbers of replicas that stages may have, such as 1,2,4; each replica runs a share of the microbatches. "
        "--stages or --devices is then the number of devices (default: 1)",
    )
    group.add_argument(
        "--optimizer",
        choices=("adam", "adamw", "momentum", "sgd", "none"),
        help="optimizer whose state takes memory; none means inference (default: adam with --schedule, else none); "
        "with fwd-bwd, the card also holds its state and the accumulated gradients",
    )
    add_recompute(group)


def _split(commands: Commands[Parser]) -> None:
    example = "splitkit split plan.json -o parts\nsplitkit split gpt2 --stages 2"
    parser = command(commands, "split", "split a model and show the code of the parts", example)
    add_plan_or_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write the code of the parts, and the stages that `splitkit train DIR` runs",
    )
    add_flag(parser, "--force", "write into a folder that is not empty")


def _run(commands: Commands[Parser]) -> None:
    example = "splitkit run plan.json --check\nsplitkit run gpt2 --stages 4 --repeat 5"
    parser = command(commands, "run", "run forward and backward of a split model or a divided training step", example)
    add_plan_or_model(parser)
    add_flag(parser, "--check", "compare with the unsplit model; exit with 4 if they differ")
    add_number(parser, "--repeat", "time the best of N runs (default 1)", 1)


def _train(commands: Commands[Parser]) -> None:
    example = (
        "splitkit train plan.json --nproc 4 --check\n"
        "splitkit train gpt2 --stages 4 --nproc 2 --schedule zbv --microbatches 8 --steps 20\n"
        "splitkit train plan.json --nproc 4 --dp 2 --recompute\n"
        "splitkit train gpt2 --stages 3 --nproc 2 --schedule order.csv --check\n"
        "torchrun --nproc-per-node 4 -m splitkit train plan.json --steps 20 --schedule 1f1b --check\n"
        "splitkit split plan.json -o stages && splitkit train stages --nproc 4"
    )
    parser = command(commands, "train", "train a split model as a pipeline of several processes", example)
    add_plan_or_model(parser)
    group = parser.add_argument_group("pipeline")
    add_number(group, "--nproc", "start N processes on this machine; without it, use torchrun")
    group.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME|FILE.csv",
        help="a schedule, as for plan (default 1f1b), or a file in torch's format with a row per rank: 0F0,0F1,0B0",
    )
    add_number(
        group,
        "--microbatches",
        "number of microbatches in a step, of all pipelines together; each is a batch like the example's inputs "
        f"(default: {USUAL_MICROBATCHES}, or the number in the file)",
    )
    add_number(group, "--dp", "N pipelines side by side (default: the replicas of the plan's parts)")
    add_flag(group, "--fsdp", "shard each stage over its replicas with torch's FSDP2")
    add_recompute(group)
    group.add_argument(
        "--compile", nargs="?", const="inductor", choices=BACKENDS, help="compile each part (default inductor)"
    )
    group.add_argument(
        "--weights", metavar="PATH", help="weights for a folder of stages: safetensors, or a torch checkpoint"
    )
    add_number(group, "--steps", "number of steps, including those before --resume (default 10)", 10)
    group.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="the optimizer (default adamw)")
    group.add_argument("--lr", type=above_zero, metavar="X", help="learning rate (default: 1e-3; for sgd 1e-2)")
    group.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="seconds that ranks wait for each other (default 300)",
    )
    add_flag(
        group,
        "--check",
        "compare losses, gradients and weights of each step with the unsplit model; exit with 4 if they differ",
    )
    group.add_argument(
        "--tolerance", type=above_zero, default=1e-5, metavar="X", help="relative tolerance of --check (default 1e-5)"
    )
    group.add_argument("--checkpoint", metavar="FOLDER", help="save the run in this folder after the last step")
    add_number(group, "--every", "also save it after every N steps")
    add_number(group, "--keep", "keep the last N checkpoints (default 2)")
    add_flag(
        group,
        "--resume",
        "continue from the last checkpoint in the folder, if there is one; without --resume, a folder that has "
        "checkpoints is refused",
    )
    add_flag(group, "--async-save", "write checkpoints while training goes on, from a copy in memory")
    add_flag(
        group,
        "--skip-failed-saves",
        "if a checkpoint cannot be written, on a full disk for example, say so and train on; the last one must be",
    )
    add_number(
        group,
        "--max-restarts",
        "with --nproc, start all ranks again up to N times if one fails, and continue from the last checkpoint",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write a timeline of the step of median time, for splitkit view --measured and Perfetto",
    )


def _sweep(commands: Commands[Parser]) -> None:
    example = (
        "splitkit sweep gpt2 --costs roofline:h100\n"
        "splitkit sweep llama --size layers=4 --points 12 --json\n"
        "splitkit sweep gpt2 --size layers=4 --of peak --offload pcie5\n"
        "splitkit sweep gpt2 --stages 2,4,8 --devices h200 --memory 80GiB\n"
        "splitkit sweep llama --stages 4 --microbatches 8,32 --schedules 1f1b,zbv,dualpipev\n"
        "splitkit sweep gpt2 --stages 4 --what fwd-bwd --chunks 1,2 --memory 4GiB --offload pcie5\n"
        "splitkit sweep plan.json --devices h200"
    )
    what = "show what training in less memory costs; or, with --stages, find the fastest and smallest pipelines"
    parser = command(commands, "sweep", what, example)
    add_plan_target(parser)
    add_model_options(parser)
    add_costs(parser.add_argument_group("prices"), "roofline:a100")
    add_number(parser, "--points", "without --stages: number of rows (default 10)")
    parser.add_argument("--of", choices=("saved", "peak"), help="without --stages: the memory to limit (default saved)")
    parser.add_argument(
        "--offload",
        metavar="LINK",
        help="with --of peak or --what fwd-bwd: move saved values to the host and back over this link, such as pcie5",
    )
    add_size(parser, "--host", "with --offload: the most bytes on the host (default: no limit)")
    add_view(parser, "the picture and the table of the results")
    group = parser.add_argument_group(
        "pipelines: plans and simulates every combination of stages, microbatches and schedules"
    )
    group.add_argument("--stages", type=numbers, metavar="N,N", help="numbers of stages, such as 2,4,8")
    group.add_argument(
        "--what",
        choices=("parts", "fwd-bwd"),
        help="cut the forward graph (parts, the default), or a training step, with the recompute that memory requires",
    )
    group.add_argument("--microbatches", type=numbers, metavar="N,N", help="numbers of microbatches (default 4,8,16)")
    group.add_argument(
        "--chunks", type=numbers, metavar="N,N", help="with --what fwd-bwd: numbers of stages on each rank, such as 1,2"
    )
    group.add_argument(
        "--schedules",
        type=words,
        metavar="NAME,NAME",
        help=f"schedules, such as 1f1b,dualpipev (default {','.join(s.word for s in known_schedules() if s.swept)})",
    )
    group.add_argument(
        "--devices", metavar="KIND", help="the device of every rank: h200, or a devices.toml with one table"
    )
    add_size(group, "--memory", "memory limit of each rank, such as 80GiB (default: the memory of KIND)")
    add_links(group)
    add_recompute(group)
    add_optimizer(group, "default adam")


def _devices(commands: Commands[Parser]) -> None:
    example = (
        "splitkit devices\n\n"
        "a device of your own, in FILE.toml:\n"
        '  links = "nvlink4"           # what connects the devices; optional, like count and launch\n'
        "  [mine]\n"
        "  count = 4                   # how many there are, for --devices FILE.toml\n"
        "  peak = { float32 = 40e12, bfloat16 = 160e12 }    # FLOP/s\n"
        "  bandwidth = 900e9           # bytes a second\n"
        "  memory = 48_000_000_000     # bytes\n"
        "  launch = 4e-6               # seconds to start a kernel"
    )
    command(commands, "devices", "list the devices and links that --devices, --costs and --links know", example)


def _completion(commands: Commands[Parser]) -> None:
    example = (
        "splitkit completion bash > ~/.local/share/bash-completion/completions/splitkit\n"
        "splitkit completion zsh > ~/.zfunc/_splitkit    # with fpath+=~/.zfunc before compinit in ~/.zshrc\n"
        "splitkit completion fish > ~/.config/fish/completions/splitkit.fish"
    )
    parser = command(commands, "completion", "print a script that completes commands and options in a shell", example)
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS), help="the shell")


def _profile(commands: Commands[Parser]) -> None:
    example = (
        "splitkit profile gpt2 --size layers=4\n"
        "splitkit profile gpt2 --stages 4\n"
        "splitkit profile plan.json --predict\n"
        "splitkit profile gpt2 --stages 4 --ranks 2 --microbatches 8"
    )
    parser = command(commands, "profile", "predict the peak memory, and measure it in a real run", example)
    add_plan_or_model(parser)
    parser.add_argument("--predict", dest="run", action="store_false", help="do not run the model")
    add_flag(parser, "--forward-only", "profile only forward, not forward + backward")
    add_view(parser, "memory over time")
    group = parser.add_argument_group("pipeline: compares simulated steps with measured ones")
    add_number(group, "--ranks", "start N processes, and run the schedules on them")
    group.add_argument(
        "--schedules",
        type=words,
        metavar="NAME,NAME",
        help="schedules, or order.csv (default: all that fit the numbers of stages and ranks)",
    )
    add_number(
        group, "--microbatches", f"microbatches in a step, 2 or more (default: the plan's own, or {USUAL_MICROBATCHES})"
    )
    add_number(group, "--repeat", "number of timed steps (default 3)", 3)
    add_recompute(group)
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write a timeline of each rank with its memory, for splitkit view --measured and Perfetto; one file for "
        "each schedule",
    )


def _view(commands: Commands[Parser]) -> None:
    example = (
        "splitkit view plan.json -o page.html --schedule 1f1b --microbatches 8 --memory 80GiB\n"
        "splitkit view gpt2 --stages 4 --costs roofline:h100 -o page.html\n"
        "splitkit view plan.json --costs measured --measured trace.json -o page.html"
    )
    parser = command(
        commands, "view", "draw forward, backward, saved bytes and borders as an interactive page", example
    )
    add_plan_or_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="the page, which needs nothing but a browser; or FILE.svg for a still picture",
    )
    parser.add_argument(
        "--beside",
        metavar="PLAN.json",
        action="append",
        help="another plan of the model, to mark what changes stages; may be given several times",
    )
    group = parser.add_argument_group("below the picture")
    group.add_argument(
        "--schedule", metavar="NAME", help="draw the timeline of a step under this schedule, as for plan"
    )
    add_number(group, "--microbatches", "microbatches in the step (default: the plan's own, or 2 per stage)")
    group.add_argument(
        "--measured",
        metavar="TRACE.json",
        help="draw what the ranks actually did next to the prediction; splitkit train --trace and profile --ranks "
        "--trace write such files",
    )
    add_recompute(group)
    add_links(group)
    add_size(group, "--memory", "memory limit of each device, such as 80GiB; peaks above it are red")
    group.add_argument(
        "--optimizer",
        choices=("adam", "momentum", "sgd", "none"),
        help="optimizer whose state takes memory; none means inference (default adam)",
    )


# Adds the commands ``explain`` and ``compare``; imports no torch.


def add_explain(commands: Commands[Parser]) -> None:
    """Add ``splitkit explain``."""
    example = "splitkit explain plan.json\nsplitkit explain plan.json add_7 --json\nsplitkit explain step.json"
    what = "explain a plan: what limits it, what must be in the part of a node, what a change would gain"
    parser = command(commands, "explain", what, example)
    parser.add_argument("target", metavar="PLAN.json", help="a plan file")
    parser.add_argument("where", metavar="NODE", nargs="?", help="a node of the graph (default: the whole plan)")
    add_model_of_plan(parser)
    add_model_options(parser)
    parser.add_argument(
        "--policy",
        metavar="EXPR",
        help="the policy whose memory, schedule and links apply (default: the one that made the plan)",
    )
    add_flag(parser, "--fast", "do not plan again with more devices or more memory")


def add_compare(commands: Commands[Parser]) -> None:
    """Add ``splitkit compare``."""
    example = "splitkit compare a.json b.json\nsplitkit compare a.json b.json --json"
    parser = command(
        commands, "compare", "compare two plans of a model: what they place differently, and what that costs", example
    )
    parser.add_argument("target", metavar="A.json", help="a plan file; its prices and limits apply to both")
    parser.add_argument("other", metavar="B.json", help="another plan file of the same model")
    add_model_of_plan(parser)
    add_model_options(parser)


# Adds the arguments of ``splitkit synthesize``.


def add_synthesize(commands: Commands[Parser]) -> None:
    """Add the parser of the command."""
    example = (
        "splitkit synthesize plan.json --microbatches 8 --memory 8GiB -o order.csv\n"
        "splitkit synthesize gpt2 --stages 8 --ranks 4 --costs roofline:h200 --links nvlink4 -o order.csv\n"
        "splitkit train plan.json --nproc 4 --schedule order.csv --check"
    )
    what = "make a pipeline schedule: order forward, input gradients and weight gradients on each rank"
    parser = command(commands, "synthesize", what, example)
    add_plan_or_model(parser)
    group = parser.add_argument_group("pipeline")
    add_number(
        group, "--microbatches", f"number of microbatches in a step (default: the plan's own, or {USUAL_MICROBATCHES})"
    )
    add_number(group, "--ranks", "number of ranks that share the parts (default: one part on each)")
    group.add_argument(
        "--placement",
        choices=("loop", "V"),
        help="with several parts per rank: part s on rank s mod N; or two per rank, in a V (default: the better one)",
    )
    add_size(group, "--memory", "memory limit of each rank, such as 80GiB (default: none)")
    add_links(group)
    add_optimizer(group, "default: the plan's own, or adam")
    add_recompute(group)
    group.add_argument(
        "--objective",
        choices=("step", "span"),
        default="step",
        help="minimize the time of a step (default), or the longest time of a rank from its first to its last action",
    )
    group.add_argument(
        "--effort",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="search effort: 10 searches ten times as much (default 1)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the order as torch's schedule CSV (- for standard output)"
    )


# Adds the arguments of commands that have many of their own: ``export``, ``fit``, ``generate``, ``plan --from``.
#
# Nothing here imports torch.


def add_export(commands: Commands[Parser]) -> None:
    """Add the parser of the command."""
    width = max(map(len, WRITES))
    formats = "\n".join(f"  {name:<{width}}  {what}" for name, what in WRITES.items())
    example = (
        "splitkit export plan.json --to megatron\n"
        "splitkit export plan.json --to torch --schedule zbv --microbatches 8 --order order.csv -o stages.py\n"
        "splitkit export llama --stages 4 --costs roofline:h100 --to vllm\n"
        "splitkit export --to list"
    )
    parser = command(commands, "export", "write a plan in the format of another tool, and price the rounding", example)
    parser.epilog = f"formats:\n{formats}\n\n{parser.epilog}"
    parser.add_argument(
        "target", nargs="?", metavar="PLAN.json|MODEL", help=f"a plan file, or {MODEL_HELP}; not needed with --to list"
    )
    add_model_of_plan(parser)
    parser.add_argument("--to", required=True, metavar="FORMAT", help="the format, or list to list them")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text (default: print it)")
    group = parser.add_argument_group("schedule and memory of the stages")
    group.add_argument(
        "--schedule",
        metavar="NAME|FILE.csv",
        help=f"{words_of()}, or an order in torch's format (default: the plan's own, or none)",
    )
    add_number(group, "--microbatches", "number of microbatches in a step (default: the plan's own)")
    group.add_argument("--order", metavar="FILE.csv", help="with --schedule: also write its actions in torch's format")
    add_size(group, "--memory", "memory limit of each rank for the rounded plan (default: none)")
    add_links(group)
    add_optimizer(group, "default: the plan's own, or adam with a schedule")
    add_recompute(group)
    add_model_options(parser)
    add_policy_options(parser)


def add_import(parser: argparse._ActionsContainer) -> None:
    """Add ``--from`` and ``--form``."""
    group = parser.add_argument_group("stages of another tool")
    group.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE",
        help="read the plan from a layout, device map, list of modules ... of another tool, and compare it with the "
        "plan of --stages or --policy (default: the same number of stages)",
    )
    group.add_argument(
        "--form",
        metavar="FORMAT",
        choices=tuple(WRITES),
        help="the format of the file; `splitkit export --to list` lists all",
    )


_FIT = (
    "splitkit fit llama-3-70b/config.json --devices 4x48GiB --tokens 8192\n"
    "splitkit fit config.json --devices rtx-3090,rtx-4090 --requests 8 --dtype float8\n"
    "splitkit fit config.json --devices 4x24GiB --train adamw --tokens 2048 --recompute\n"
    "splitkit fit my_model.py:make --devices 2x24GiB --json"
)


def add_fit(commands: Commands[Parser]) -> None:
    """Add the command."""
    parser = command(commands, "fit", "say whether a model fits your devices, and what would fit instead", _FIT)
    parser.add_argument(
        "model",
        metavar="CONFIG|MODEL",
        help=f"a transformers config.json or its folder, {MODEL_HELP}; no weights are created",
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="the devices, such as 2x24GiB or rtx-3090,rtx-4090; `splitkit devices` lists the names (default: the GPUs "
        "of this machine, or its main memory); 5%% of each stays free",
    )
    add_number(
        parser,
        "--tokens",
        "tokens of each request or training sequence (default: 4096, or the model's context if that is less)",
    )
    add_number(parser, "--requests", "requests at once, or sequences per microbatch (default 1)", 1)
    add_number(parser, "--chunk", "largest number of new tokens per step, over all requests (default 512)", 512)
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16; float8 or int4 for the weights of the layers (default: the model's own)",
    )
    parser.add_argument(
        "--size",
        type=sizes,
        action="append",
        metavar="NAME=N",
        help="sizes of an example or factory: layers=4,width=256",
    )
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train",
        choices=("adam", "adamw", "momentum", "sgd"),
        help="train with this optimizer, as a pipeline with one stage per device (default: inference)",
    )
    group.add_argument("--schedule", default="1f1b", metavar="NAME", help="1f1b (default) or gpipe")
    add_number(group, "--microbatches", "microbatches in a step (default: 2 per device)")
    add_recompute(group)


_GENERATE = (
    "splitkit generate llama --stages 2 --prompt-ids 5,6,7\n"
    "splitkit plan llama --how decoder --stages 2 -o plan.json && splitkit generate plan.json --prompt-ids 5,6,7\n"
    "splitkit split plan.json -o stages && splitkit generate stages --weights checkpoint --tokenizer checkpoint "
    '--prompt "Once upon a time"\n'
    "splitkit generate plan.json --requests requests.jsonl --json\n"
    "torchrun --nproc-per-node 2 -m splitkit generate plan.json --prompt-ids 5,6,7"
)


def add_generate(commands: Commands[Parser]) -> None:
    """Add the command."""
    what = "generate text with a split decoder, one stage on each of several processes"
    parser = command(commands, "generate", what, _GENERATE)
    add_plan_or_model(parser)
    asked = parser.add_argument_group("requests")
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    asked.add_argument(
        "--prompt-ids",
        type=token_ids,
        action="append",
        metavar="ID,ID",
        help="a prompt as token ids; may be given several times",
    )
    asked.add_argument(
        "--requests",
        metavar="FILE.jsonl",
        help='a file with a request per line, such as {"input_ids": [5, 6], "max_new_tokens": 9, "do_sample": true}; '
        '"prompt" may replace "input_ids"',
    )
    asked.add_argument(
        "--tokenizer", metavar="PATH", help="the tokenizer for text: a folder, or a name on the Hugging Face Hub"
    )
    how = parser.add_argument_group("tokens (a request in the file may override these)")
    add_number(how, "--max-new-tokens", "largest number of tokens to generate (default 20)")
    add_flag(how, "--do-sample", "draw tokens at random, instead of the most likely one", default=None)
    how.add_argument("--temperature", type=above_zero, metavar="X", help="divides the logits (default 1)")
    how.add_argument("--top-k", type=natural, metavar="K", help="draw from the K most likely tokens (default: all)")
    how.add_argument(
        "--top-p",
        type=above_zero,
        metavar="P",
        help="draw from the likeliest tokens with this total probability (default 1)",
    )
    run = parser.add_argument_group("processes")
    add_number(run, "--nproc", "start N processes, one per stage (default: the number of stages)")
    run.add_argument("--weights", metavar="PATH", help="weights for a folder of stages, as for splitkit train")
    add_number(run, "--in-flight", "largest number of requests in flight (default: 2 per stage)")
    add_number(
        run,
        "--cache-tokens",
        "largest number of tokens in the KV caches of all requests in flight; others wait (default: no limit)",
    )
    add_number(run, "--chunk", "largest number of prompt tokens that run at once (default: all)")
    run.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="seconds that ranks wait for each other (default 300)",
    )


def token_ids(text: str) -> list[int]:
    """Return the token ids in a text such as ``5,6,7``."""
    return [natural(word) for word in text.split(",")]
