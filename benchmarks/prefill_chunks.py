"""What chunks of a prompt of equal time would bring over chunks of equal length, computed from FLOPs: ``--json``.

A chunk of c tokens after p others costs c (1 + (p + c / 2) / r): the layers cost the same for each token, and attention
as much as they after r positions. A prompt passes n stages as jobs pass a line of machines, in the time of all its
chunks and n - 1 times the longest one. Both ways have the same number of chunks here.

``prompt``    the time of a prompt with chunks of equal length over that with chunks of equal time.
``hold-up``   the longest chunk, for which other requests wait, over that of equal time.
``first``     the first chunk of equal time over one of equal length: the memory of activations grows with it.

Nothing is measured: the figures are ratios of FLOPs, and kernels are less efficient for short chunks.
"""

from __future__ import annotations

import argparse
import json
import math

from rich.console import Console
from rich.table import Table

MODELS = {
    # parameters that multiply each token (without the embedding), heads x head size, layers
    "Llama-3-8B": (7.5e9, 32 * 128, 32),
    "Llama-3-70B": (69.5e9, 64 * 128, 80),
}
PROMPTS = ((8192, 512), (32768, 2048), (131072, 2048))


def row(model: str, tokens: int, chunk: int, stages: int) -> dict[str, float | int | str]:
    """Return the ratios of a prompt that is run in chunks."""
    parameters, width, layers = MODELS[model]
    equals = parameters * 2 / (4 * width * layers)
    count = tokens // chunk
    long = [_cost(chunk, i * chunk, equals) for i in range(count)]
    each = sum(long) / count
    first = equals * (math.sqrt(1 + 2 * each / equals) - 1)
    return {
        "model": model,
        "tokens": tokens,
        "chunk": chunk,
        "stages": stages,
        "prompt": (sum(long) + (stages - 1) * long[-1]) / (sum(long) + (stages - 1) * each),
        "hold-up": long[-1] / each,
        "first": first / chunk,
    }


def _cost(chunk: float, before: float, equals: float) -> float:
    return chunk * (1 + (before + chunk / 2) / equals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [row(model, *prompt, stages) for model in MODELS for prompt in PROMPTS for stages in (2, 4, 8)]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    table = Table(*rows[0])
    for one in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in one.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
