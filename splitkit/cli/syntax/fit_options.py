"""Adds the command ``splitkit fit`` and its options; imports no torch."""

from __future__ import annotations

from splitkit.cli.syntax.arguments import Parser, positive, sizes
from splitkit.cli.syntax.options import MODEL_HELP, Commands, add_recompute, command

_EXAMPLE = (
    "splitkit fit llama-3-70b/config.json --devices 4x48GiB --tokens 8192\n"
    "splitkit fit config.json --devices rtx-3090,rtx-4090 --requests 8 --dtype float8\n"
    "splitkit fit config.json --devices 4x24GiB --train adamw --tokens 2048 --recompute\n"
    "splitkit fit my_model.py:make --devices 2x24GiB --json"
)


def add_fit(commands: Commands[Parser]) -> None:
    """Add the command."""
    parser = command(commands, "fit", "say whether a model fits your devices, and what would fit instead", _EXAMPLE)
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
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens of each request or training sequence (default: 4096, or the model's context if that is less)",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        default=1,
        metavar="N",
        help="requests at once, or sequences per microbatch (default 1)",
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=512,
        metavar="N",
        help="largest number of new tokens per step, over all requests (default 512)",
    )
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
    group.add_argument(
        "--microbatches", type=positive, metavar="N", help="microbatches in a step (default: 2 per device)"
    )
    add_recompute(group)
