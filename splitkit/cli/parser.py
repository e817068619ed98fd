"""The arguments of every command. Nothing here waits for torch."""

from __future__ import annotations

import argparse

from splitkit import __version__
from splitkit.cli.arguments import Parser, above_zero, numbers, positive, words
from splitkit.cli.options import (
    MODEL_HELP,
    Commands,
    HelpFormatter,
    add_costs,
    add_links,
    add_model_options,
    add_on_cycle,
    add_output,
    add_plan_or_model,
    add_plan_target,
    add_training,
    add_view,
    command,
)
from splitkit.cli.partflags import BACKENDS

EPILOG = """exit codes:
  0 fine   1 error   2 wrong usage   3 no plan fits   4 the split differs from the whole   130 interrupted

example:
  splitkit plan gpt2 --stages 4 -o plan.json && splitkit run plan.json --check"""


def make_parser() -> Parser:
    """The parser of ``splitkit``."""
    parser = Parser(
        prog="splitkit",
        description="Split PyTorch graphs into parts, and prove that the parts do what the whole did.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"splitkit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _capture(commands)
    _plan(commands)
    _split(commands)
    _run(commands)
    _train(commands)
    _profile(commands)
    _view(commands)
    _sweep(commands)
    _devices(commands)
    command(commands, "policies", "list the policies that --policy knows", "splitkit policies --json")
    command(commands, "doctor", "check the installation, and split a tiny model", "splitkit doctor")
    return parser


def _capture(commands: Commands[Parser]) -> None:
    example = "splitkit capture gpt2 --size layers=4,width=256,heads=4\nsplitkit capture my_model.py:make -o graph.json"
    parser = command(commands, "capture", "capture a model as a graph and describe it", example)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_model_options(parser)
    parser.add_argument("--code", action="store_true", help="also print the code of the graph")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the nodes as JSON (- for standard output)")


def _plan(commands: Commands[Parser]) -> None:
    example = (
        "splitkit plan gpt2 --stages 4 -o plan.json\n"
        "splitkit plan gpt2 --policy \"ByName({'transformer.h.[0-5]': 0, 'transformer.h.*': 1})\"\n"
        "splitkit plan llama --policy \"AroundOps(['aten.scaled_dot_product_attention'])\"\n"
        "splitkit plan gpt2 --devices 4xh200 --schedule 1f1b --microbatches 8 --trace timeline.json -o plan.json\n"
        "splitkit plan gpt2 --devices 8xh200 --schedule 1f1b --replicas 1,2,4\n"
        "splitkit plan llama --devices h200,h200,a100 --objective latency\n"
        "splitkit plan gpt2 --what fwd-bwd --memory 2GiB -o step.json && splitkit run step.json --check"
    )
    parser = command(commands, "plan", "decide which part computes which node", example)
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    _add_parts(parser.add_argument_group("how to cut"))
    _add_limits(parser.add_argument_group("devices (with --devices or --stages)"))
    _add_step(parser.add_argument_group("training step (with --devices or --stages)"))
    prices = parser.add_argument_group("prices")
    add_costs(prices, "flops; with --devices their roofline; with fwd-bwd roofline:a100")
    add_training(prices)
    add_model_options(parser)
    output = parser.add_argument_group("output")
    add_output(output)
    add_view(output, "the plan, as splitkit view draws it")
    output.add_argument("--trace", metavar="FILE", help="with --schedule: write the timeline for Perfetto")


def _add_parts(group: argparse._ArgumentGroup) -> None:
    one = group.add_mutually_exclusive_group()
    one.add_argument("--stages", type=positive, metavar="N", help="N pipeline stages")
    group.add_argument(
        "--devices",
        metavar="LIST",
        help="parts for these devices: 4xh200, or h200,h200,a100, or FILE.toml (as `splitkit devices --help` says); "
        "devices of one kind become stages of a pipeline",
    )
    one.add_argument("--policy", metavar="EXPR", help="a policy with its parameters; `splitkit policies` lists them")
    group.add_argument(
        "--what",
        choices=("parts", "fwd-bwd"),
        default="parts",
        help="cut the forward into parts (default), or a training step into forward and backward",
    )
    add_on_cycle(group)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="of each device: 80GiB, 80%% of what it has, or least for the stages with the lowest peak (default: all "
        "it has); with fwd-bwd least, the peak that is allowed: 2GiB, or 50%% of what can be saved; with fwd-bwd and "
        "--optimizer the memory of the card: 24GiB, of which 5%% are left free",
    )
    add_links(group)
    group.add_argument(
        "--objective",
        choices=("throughput", "latency"),
        help="least load of the busiest device (default), or least time of one sample",
    )


def _add_step(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv or dualpipev; the step is "
        "simulated (default: inference, one sample after the other)",
    )
    group.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help="of a step, each of the size that is captured (default: two a stage)",
    )
    group.add_argument(
        "--replicas",
        type=numbers,
        metavar="LIST",
        help="on how many devices a stage may stand, such as 1,2,4: each runs its share of every microbatch; --stages "
        "or --devices then says how many devices there are (default: 1)",
    )
    group.add_argument(
        "--optimizer",
        choices=("adam", "adamw", "momentum", "sgd", "none"),
        help="whose state is held; none: inference (default: adam with --schedule, else none); with fwd-bwd: the card "
        "holds its state and the gradients of earlier microbatches, too",
    )


def _split(commands: Commands[Parser]) -> None:
    example = "splitkit split plan.json -o parts\nsplitkit split gpt2 --stages 2"
    parser = command(commands, "split", "split a model and show the code of the parts", example)
    add_plan_or_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write the code of the parts, and their stages: `splitkit train DIR` runs them",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")


def _run(commands: Commands[Parser]) -> None:
    example = "splitkit run plan.json --check\nsplitkit run gpt2 --stages 4 --repeat 5"
    parser = command(commands, "run", "run a split model, or a divided training step, forward and backward", example)
    add_plan_or_model(parser)
    parser.add_argument("--check", action="store_true", help="compare with the unsplit model; exit 4 if not the same")
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="time the best of N runs (default 1)")


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
    group.add_argument("--nproc", type=positive, metavar="N", help="start N processes here; without it torchrun does")
    group.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME|FILE.csv",
        help="as of plan (default 1f1b), or an order of your own as torch writes it: a row for each rank, 0F0,0F1,0B0",
    )
    group.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help="of a step, each as the example's inputs, of all pipelines together (default: 8, or as the file has)",
    )
    group.add_argument(
        "--dp", type=positive, metavar="N", help="N pipelines side by side (default: the replicas of the plan's parts)"
    )
    group.add_argument("--fsdp", action="store_true", help="shard each stage over its replicas: torch's FSDP2")
    group.add_argument("--recompute", action="store_true", help="keep only the inputs of parts, and compute them again")
    group.add_argument(
        "--compile", nargs="?", const="inductor", choices=BACKENDS, help="compile each part (default inductor)"
    )
    group.add_argument("--weights", metavar="PATH", help="of a folder of stages: safetensors, or a torch checkpoint")
    group.add_argument(
        "--steps", type=positive, default=10, metavar="N", help="in all, those before --resume too (default 10)"
    )
    group.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="default adamw")
    group.add_argument("--lr", type=above_zero, metavar="X", help="learning rate (default: 1e-3, of sgd 1e-2)")
    group.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="seconds that ranks wait for each other (default 300)",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="compare losses, gradients and weights of each step with the unsplit model; exit 4 if not the same",
    )
    group.add_argument(
        "--tolerance", type=above_zero, default=1e-3, metavar="X", help="of --check, relative (default 1e-3)"
    )
    group.add_argument("--checkpoint", metavar="FOLDER", help="write model and optimizer after the last step")
    group.add_argument("--every", type=positive, metavar="N", help="and after each N steps")
    group.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder, if any")


def _sweep(commands: Commands[Parser]) -> None:
    example = (
        "splitkit sweep gpt2 --costs roofline:h100\n"
        "splitkit sweep llama --size layers=4 --points 12 --json\n"
        "splitkit sweep gpt2 --size layers=4 --of peak\n"
        "splitkit sweep gpt2 --stages 2,4,8 --devices h200 --memory 80GiB\n"
        "splitkit sweep llama --stages 4 --microbatches 8,32 --schedules 1f1b,zbv,dualpipev\n"
        "splitkit sweep plan.json --devices h200"
    )
    what = "show what less memory for training costs; or, with --stages, which pipelines are fastest and smallest"
    parser = command(commands, "sweep", what, example)
    add_plan_target(parser)
    add_model_options(parser)
    add_costs(parser.add_argument_group("prices"), "roofline:a100")
    parser.add_argument("--points", type=positive, metavar="N", help="without --stages: rows to show (default 10)")
    parser.add_argument(
        "--of", choices=("saved", "peak"), help="without --stages: the memory that is bounded (default saved)"
    )
    add_view(parser, "the picture and the table of all that was found")
    group = parser.add_argument_group("pipelines: stages x microbatches x schedules, each planned and simulated")
    group.add_argument("--stages", type=numbers, metavar="N,N", help="numbers of stages, such as 2,4,8")
    group.add_argument("--microbatches", type=numbers, metavar="N,N", help="of a step (default 4,8,16)")
    group.add_argument(
        "--schedules",
        type=words,
        metavar="NAME,NAME",
        help="such as 1f1b,dualpipev (default gpipe,1f1b,interleaved-1f1b,zbv)",
    )
    group.add_argument("--devices", metavar="KIND", help="what all ranks are: h200, or devices.toml with one table")
    group.add_argument("--memory", metavar="SIZE", help="bytes of each rank, such as 80GiB (default: that of KIND)")
    add_links(group)
    group.add_argument("--optimizer", choices=("adam", "momentum", "sgd"), help="whose state is held (default adam)")


def _devices(commands: Commands[Parser]) -> None:
    example = (
        "splitkit devices\n\n"
        "a device of your own, in FILE.toml:\n"
        '  links = "nvlink4"           # what connects the devices; optional, as are count and launch\n'
        "  [mine]\n"
        "  count = 4                   # how many there are, for --devices FILE.toml\n"
        "  peak = { float32 = 40e12, bfloat16 = 160e12 }    # FLOP/s\n"
        "  bandwidth = 900e9           # bytes a second\n"
        "  memory = 48_000_000_000     # bytes\n"
        "  launch = 4e-6               # seconds to start a kernel"
    )
    command(commands, "devices", "list the devices and links that --devices, --costs and --links know", example)


def _profile(commands: Commands[Parser]) -> None:
    example = (
        "splitkit profile gpt2 --size layers=4\n"
        "splitkit profile gpt2 --stages 4\n"
        "splitkit profile plan.json --predict\n"
        "splitkit profile gpt2 --stages 4 --ranks 2 --microbatches 8"
    )
    parser = command(commands, "profile", "predict the peak of memory, and measure it in a real run", example)
    add_plan_or_model(parser)
    parser.add_argument("--predict", dest="run", action="store_false", help="do not run the model")
    parser.add_argument("--forward-only", action="store_true", help="leave out forward + backward")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="largest values to show (default 10)")
    add_view(parser, "the bytes over time")
    group = parser.add_argument_group("pipeline: steps as simulated from measured stages and links, and as they ran")
    group.add_argument("--ranks", type=positive, metavar="N", help="start N processes, and run schedules on them")
    group.add_argument(
        "--schedules",
        type=words,
        metavar="NAME,NAME",
        help="names or order.csv (default: all of torch's that go with stages and ranks)",
    )
    group.add_argument("--microbatches", type=positive, default=8, metavar="N", help="of a step, 2 or more (default 8)")
    group.add_argument("--repeat", type=positive, default=3, metavar="N", help="steps that are timed (default 3)")


def _view(commands: Commands[Parser]) -> None:
    example = (
        "splitkit view plan.json -o page.html --schedule 1f1b --microbatches 8 --memory 80GiB\n"
        "splitkit view gpt2 --stages 4 --costs roofline:h100 -o page.html"
    )
    parser = command(commands, "view", "draw forward, backward, saved bytes and cuts as a page to steer", example)
    add_plan_or_model(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the page; it needs nothing but a browser"
    )
    parser.add_argument(
        "--beside", metavar="PLAN.json", help="another plan of the model, to see what is in another stage"
    )
    group = parser.add_argument_group("below the picture")
    group.add_argument("--schedule", metavar="NAME", help="the timeline of a step: gpipe, 1f1b, ...; as of plan")
    group.add_argument("--microbatches", type=positive, metavar="N", help="of a step (default: two a stage)")
    add_links(group)
    group.add_argument("--memory", metavar="SIZE", help="bytes of each device, such as 80GiB: what exceeds it is red")
    group.add_argument(
        "--optimizer", choices=("adam", "momentum", "sgd", "none"), help="none: inference (default adam)"
    )
