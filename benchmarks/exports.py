"""Export GPT-2, Llama and T5 to every format, and print what rounding to modules costs, or why it is refused.

    python benchmarks/exports.py            a table
    python benchmarks/exports.py --json     the rows as JSON

Four stages, by the roofline of an H100 with NVLink. Formats of tools that train carry a plan for 1F1B with 8
microbatches, the others a plan for inference. All figures are simulated.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict

import torch

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.exports.import_plan import FORMATS
from splitkit.policies import Stages
from splitkit.testing import models

MODELS = ("gpt2", "llama", "t5")
STAGES, MICROBATCHES = 4, 8


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = [row for model in MODELS for row in rows_of(model)]
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows, indent=1))
        return
    print("| format | model | slowest stage | step | peak | sent | price |\n|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: list(FORMATS).index(row["to"])):
        print(line_of(row), flush=True)


def rows_of(model: str) -> list[dict]:
    """One row for each format."""
    example = models.build(model)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    costs = sk.costs.roofline(gm, device="h100")
    made = {
        schedule: sk.split(gm, sk.plan(gm, Stages(STAGES, schedule=schedule, links="nvlink4"), costs))
        for schedule in (None, "1f1b")
    }
    return [row_of(model, to, made) for to in FORMATS]


def row_of(model: str, to: str, made: dict) -> dict:
    schedule = "1f1b" if FORMATS[to].schedules != "none" else None
    options = {} if schedule is None else {"schedule": schedule, "microbatches": MICROBATCHES}
    row = {"model": model, "to": to, "schedule": schedule}
    try:
        found = sk.export(made[schedule], to=to, **options)
    except SplitError as error:
        return row | {"refused": f"{error.code}: {error.reason}"}
    price = found.rounding
    return row | {
        "before": asdict(price.before),
        "after": asdict(price.after),
        "moved": price.moved,
        "ratio": price.ratio,
        "text": found.text,
    }


def line_of(row: dict) -> str:
    from splitkit.units import duration, size

    if "refused" in row:
        return f"| {row['to']} | {row['model']} | refused: {row['refused'].partition('the plan: ')[2]} | | | | |"
    low, high = row["before"], row["after"]

    def both(field: str, show) -> str:
        return f"{show(low[field])} -> {show(high[field])}" if row["moved"] else show(low[field])

    step = both("step", duration) if low["step"] else ""
    cells = [both("load", duration), step, both("peak", size), both("traffic", size)]
    return f"| {row['to']} | {row['model']} | {' | '.join(cells)} | {row['ratio'] - 1:+.1%} |"


if __name__ == "__main__":
    main()
