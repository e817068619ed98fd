"""``splitkit fit``: says whether a model fits devices, what each holds, and what would fit instead."""

from __future__ import annotations

from argparse import Namespace
from time import perf_counter

import splitkit as sk
from splitkit.cli import NO_PLAN, factories
from splitkit.cli.common import find_own_code
from splitkit.cli.outcome import Lines, Outcome, seconds_text
from splitkit.view.console import show_spinner


def run(args: Namespace) -> Outcome:
    """Run ``splitkit fit``; exit with 3 if the model does not fit."""
    factories.check_model_name(args.model, plans=False)
    if ":" in args.model:
        find_own_code(args.model)
    start = perf_counter()
    sizes: dict[str, int] = {}
    for some in args.size or ():
        sizes |= some
    with show_spinner(f"fitting {args.model}"):
        found = sk.fit(
            args.model,
            args.devices,
            tokens=args.tokens,
            requests=args.requests,
            chunk=args.chunk,
            train=args.train,
            schedule=args.schedule,
            microbatches=args.microbatches,
            recompute=bool(args.recompute),
            dtype=args.dtype,
            sizes=sizes,
        )
    took = perf_counter() - start
    verdict, *instead = found.lines()
    data = {**found.to_dict(), "seconds": took}
    text: Lines = [found.table(), "", verdict, *instead, f"took {seconds_text(took)}"]
    if found.next:
        text.append(f"next: {found.next}")
    return Outcome(data, text, code=0 if found.fits else NO_PLAN)
