"""``splitkit explain``: says why a plan, or the place of one of its nodes, is as it is."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from splitkit.cli.common import decoded, prepare_for, read_plan
from splitkit.cli.factories import check_model_name
from splitkit.cli.outcome import Outcome
from splitkit.cli.syntax import policy_spec
from splitkit.errors import UsageError


def run(args: Namespace) -> Outcome:
    """Run ``splitkit explain``."""
    require_file(args.target, "explain")
    file = read_plan(args.target)
    policy = None if args.policy is None else policy_spec.parse(args.policy).build().policy  # type: ignore[attr-defined]
    work = prepare_for(args, file)
    plan = decoded(work.gm.graph, args.target, file)
    from splitkit.studies.explanation.explain import explain

    with work.clock.step("explain", "pricing what could be changed"):
        found = explain(plan, args.where, policy=policy, again=not args.fast)
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "file": args.target,
        "where": args.where,
        "explanation": found.to_dict(),
        "seconds": work.clock.seconds,
    }
    return Outcome(data, found.lines())


def require_file(path: str, name: str) -> None:
    """Refuse a model in place of a plan file.

    Raises:
        UsageError: SK601; SK402 and SK602 for what is no model either.
    """
    if not path.endswith(".json"):
        check_model_name(path, plans=True)
        raise UsageError(
            "SK601",
            f"splitkit {name} reads plan files, and {path} does not end in .json",
            f"Plan first: splitkit plan {path} --stages 4 -o plan.json && splitkit {name} plan.json",
        )
