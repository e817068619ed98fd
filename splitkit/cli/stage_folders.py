"""Writes the folders of stages of ``splitkit split -o``, and opens them for ``splitkit train``."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitkit.cli import source
from splitkit.cli.common import CapturedModel, Stopwatch, prepare, versions, with_part_flags
from splitkit.cli.source import Source
from splitkit.errors import PipelineError, SplitError, UsageError
from splitkit.testing.models import Example

if TYPE_CHECKING:
    from splitkit.engine.json_fields import JsonField
    from splitkit.engine.split import Split
    from splitkit.engine.staged_step import StagedStep
    from splitkit.runtime.folder.load import StageFolder

_MANIFEST = "manifest.json"
_DECIDED = ("stages", "policy", "costs", "training", "size", "how", "dynamic", "eval", "recompute")


def save_stage_folder(folder: Path, split: Split | StagedStep, work: CapturedModel) -> str | None:
    """Write the stages of a split into a folder; return the reason if there are none: no pipeline, or no data."""
    from splitkit.runtime import save_stages

    example = work.example
    record = {"model": source.source_record(work.source, folder), **versions()}
    inputs: Any = (tuple(example.args), dict(example.kwargs))
    if work.source.how == "decoder":
        inputs, record = None, record | {"generation": generation_record(example.model)}
    try:
        save_stages(split, folder, inputs=inputs, record=record)
    except SplitError as error:
        if not isinstance(error, PipelineError) and error.code != "SK506":
            raise
        return f"{error.code}: {error.reason}"
    return None


def generation_record(model: Any) -> dict[str, Any]:
    """Return what generation needs of a model of transformers besides its stages.

    Returns:
        ``eos_token_id``, the tokens that end a sequence; ``pad_token_id``, or ``None``; and ``positions``, the most
        tokens of a sequence, or ``None``.
    """
    from splitkit.runtime.generation.before_stages import ModelTokens

    known = ModelTokens.of(model)
    ends = list(known.eos_token_id)
    return {"eos_token_id": ends, "pad_token_id": known.pad_token_id, "positions": known.positions}


def checked_generation_record(data: JsonField) -> dict[str, Any]:
    """Return the record of `generation_record` that a manifest holds.

    Raises:
        FileError: SK505 if it is damaged.
    """
    pad, positions = data["pad_token_id"], data["positions"]
    return {
        "eos_token_id": [token.whole() for token in data["eos_token_id"].items()],
        "pad_token_id": None if pad.value is None else pad.whole(),
        "positions": None if positions.value is None else positions.whole(),
    }


def is_folder(target: str) -> bool:
    """Return whether the target of a command is a folder of stages."""
    return (Path(target) / _MANIFEST).is_file()


def require_fitting_options(args: Namespace) -> None:
    """Refuse options that a folder of stages has already decided, and ``--weights`` for another target.

    Raises:
        UsageError: SK601.
    """
    if not is_folder(args.target):
        if args.weights is not None:
            raise UsageError("SK601", "--weights needs a folder of stages", "Write one: splitkit split PLAN -o FOLDER.")
        return
    if decided := [name for name in _DECIDED if getattr(args, name, None) is not None]:
        reason = f"--{decided[0].replace('_', '-')} cannot be combined with a folder of stages"
        raise UsageError("SK601", reason, "Plan and split again with it.")


def opened(args: Namespace) -> tuple[CapturedModel, StageFolder]:
    """Open the stages in a folder; make the unsplit model only on rank 0 with ``--check``."""
    from splitkit.runtime import open_stages

    held = open_stages(args.target, args.weights)
    held = replace(held, plan=with_part_flags(held.plan, args))
    inputs, named = held.example()
    example = Example(held.module, inputs, named)
    if not args.check or int(os.environ["RANK"]):
        return CapturedModel(_source(args, held.manifest.value), example, held.module, Stopwatch()), held
    whole = prepare(source.from_plan(args.target, held.manifest.value, args))
    held.fill(whole.gm)
    return replace(whole, example=example), held


def _source(args: Namespace, manifest: dict[str, Any]) -> Source:
    record = manifest.get("model")
    found = Source(args.target, {}) if record is None else source.recorded(args.target, record)
    if args.loss is not None:
        source.require_loss_of_plan(found, args)
    return found if args.seed is None else replace(found, seed=args.seed)
