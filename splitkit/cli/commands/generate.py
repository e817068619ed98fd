"""``splitkit generate``: generates text with a split decoder, one stage on each of several processes."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import launcher, source
from splitkit.cli.commands.train import planned_together, words_for_ranks
from splitkit.cli.common import (
    checked_generation_record,
    example_of,
    is_folder,
    plan_file,
    policy_of,
    require_fitting_options,
    require_policy_option,
)
from splitkit.cli.outcome import Lines, Outcome, seconds_text
from splitkit.errors import FileError, PipelineError, UsageError
from splitkit.testing.config_files import checkpoint_beside, is_config
from splitkit.units import size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from splitkit.engine.split import Split
    from splitkit.runtime.folder.load import StageFolder
    from splitkit.runtime.generation.generation_request import RequestResult

DECODER = "decoder"
"""The way of capture of a model that generates."""
_WRITE_STAGES = "Write one: splitkit split PLAN -o stages, and name it instead. "
_SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")


def run(args: Namespace) -> Outcome:
    """Run ``splitkit generate``: start the ranks, or be one of them."""
    if args.how is None and not args.target.endswith(".json") and not is_folder(args.target):
        args.how = DECODER
    if "RANK" in os.environ:
        data = launcher.in_group(lambda: _generate(args), args.timeout)
        return Outcome(data, _text(data), quiet=data["rank"] != 0)
    if not (args.prompt or args.prompt_ids or args.requests):
        raise UsageError("SK601", "there is nothing to continue", "Give --prompt, --prompt-ids or --requests.")
    stages = _stages(args)
    _requests(args, None if args.tokenizer is None else lambda text: [])  # what no rank could read
    code, data = launcher.answer(words_for_ranks(), args.nproc or stages, args.timeout)
    if data is None:
        return Outcome({}, [], code or 1, quiet=True)
    failed = any(result["error"] for result in data["results"])
    return Outcome(data, _text(data), code or int(failed))


def _stages(args: Namespace) -> int:
    """Return the number of stages; refuse a target that no rank could run before any rank is started.

    Raises:
        UsageError: SK601 for a plan of something else than a decoder, or without a number of stages.
        FileError: SK50x for a plan or a folder of stages that cannot be read.
    """
    require_fitting_options(args)
    if is_folder(args.target):
        held = sk.runtime.open_stages(args.target, args.weights)
        if args.weights is None:
            _require_no_checkpoint(_spec(held.manifest.value.get("model")), "")
        return len(held.names)
    file = plan_file(args)
    if file is None:
        require_policy_option(args)
        policy_of(args)
        _require_no_checkpoint(args.target, _WRITE_STAGES)
        if args.stages is None and args.nproc is None:
            raise UsageError("SK601", "the number of stages follows from the policy", "Add --nproc N.")
        stages: int = args.stages or args.nproc
        return stages
    known = source.from_plan(args.target, file, args)
    if known.how == DECODER:
        _require_no_checkpoint(known.spec, _WRITE_STAGES)
    else:
        reason = f"{args.target} is a plan for another graph of the model than one step of generation"
        raise UsageError("SK601", reason, "Plan with: splitkit plan MODEL --how decoder --stages N -o FILE.")
    return len(file["parts"])


def _spec(model: Any) -> str:
    """Return how a user named the model of a record."""
    return str(model.get("spec", "")) if isinstance(model, dict) else ""


def _require_no_checkpoint(spec: str, before: str) -> None:
    """Refuse to generate with random weights where a configuration lies beside its checkpoint.

    Raises:
        UsageError: SK601.
    """
    if found := checkpoint_beside(spec):
        reason = f"the weights would be random: only a folder of stages with --weights reads those in {found}"
        raise UsageError("SK601", reason, f"{before}Add --weights {found}.")


def _generate(args: Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    from splitkit.runtime.ranks.rank_agreement import from_every

    split, record, known = _decoder(args)
    generator = sk.serve(
        split,
        **known,
        in_flight=args.in_flight,
        cache_tokens=args.cache_tokens,
        chunk=args.chunk,
    )
    rank, invented = dist.get_rank(), is_config(_spec(record))
    encode, decode = _tokenizer(args) if not rank else (None, None)
    start = time.perf_counter()
    results = generator.generate(_requests(args, encode) if not rank else ())
    seconds = time.perf_counter() - start
    return {
        "rank": rank,
        "model": record,
        "note": split.plan.note,
        "weights": args.weights or ("random, since a configuration has none" if invented else None),
        "results": [_described(result, decode) for result in results],
        "seconds": seconds,
        "ranks": from_every({"rank": rank, "weights": generator.stage.weight_bytes()}, None),
    }


def _decoder(args: Namespace) -> tuple[Split | StageFolder, Any, dict[str, Any]]:
    """Return the split of this rank or the folder of stages, a record of the model, and what else generation needs."""
    require_fitting_options(args)
    if not is_folder(args.target):
        work, plan = planned_together(args)
        assert not work.trains, "the plan of a training step is refused before ranks start"
        return sk.split(work.gm, plan), work.source.to_dict(), {"model": work.example.model}
    from splitkit.runtime.generation.decoder import DecoderChain

    held = sk.runtime.open_stages(args.target, args.weights)
    known = held.manifest.value.get("generation")
    if known is None:
        raise PipelineError(
            "SK801",
            f"{args.target} holds stages that do not generate",
            "Plan with --how decoder, and split again.",
        )
    record = held.manifest.value.get("model")
    needed = checked_generation_record(held.manifest["generation"])
    if DecoderChain.of(held.chain).inputs.whole and not int(os.environ["RANK"]):
        # its weights are read from the folder, or from --weights
        needed["model"] = example_of(source.from_plan(args.target, held.manifest.value, args)).model.eval()
    return held, record, needed


def _tokenizer(args: Namespace) -> tuple[Callable[[str], list[int]] | None, Callable[[list[int]], str] | None]:
    """Return what makes token ids of text and text of token ids, without a tokenizer neither."""
    if args.tokenizer is None:
        return None, None
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(args.tokenizer)
    except (OSError, ValueError) as error:
        reason = f"{args.tokenizer} has no tokenizer that transformers reads"
        raise FileError("SK504", reason, "Give a folder with a tokenizer.") from error
    return lambda text: list(made(text)["input_ids"]), lambda tokens: made.decode(tokens, skip_special_tokens=True)


def _requests(args: Namespace, encode: Callable[[str], list[int]] | None) -> list[Any]:
    """Return the requests of the command line and of the file."""
    default = {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}
    asked: list[Any] = [{"prompt": text} for text in args.prompt or ()]
    asked += [{"input_ids": tokens} for tokens in args.prompt_ids or ()]
    asked += _lines(args.requests) if args.requests else []
    if encode is None and any(isinstance(one, dict) and "prompt" in one for one in asked):
        raise UsageError("SK601", "a prompt of text needs a tokenizer", _tokenizer_remedy(args))
    return [_with_ids({**default, **one}, encode) if isinstance(one, dict) else one for one in asked]


def _tokenizer_remedy(args: Namespace) -> str:
    """Return how to give the tokenizer that lies beside the weights or the configuration, else token ids."""
    for place in filter(None, (args.weights, args.model, args.target)):
        folder = Path(place) if Path(place).is_dir() else Path(place).parent
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            return f"Add --tokenizer {folder}."
    return "Add --tokenizer PATH, the folder of a checkpoint; or give token ids: --prompt-ids 5,6,7."


def _lines(path: str) -> Iterable[Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FileError("SK504", f"{path} cannot be read: {error}", "Name a file with a request per line.") from error
    for line in text.splitlines():
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                # a request that no rank can read, which fails alone
                yield line


def _with_ids(asked: dict[str, Any], encode: Callable[[str], list[int]] | None) -> dict[str, Any]:
    if encode is None or "prompt" not in asked:
        return asked
    text = asked.pop("prompt")
    if not all(isinstance(one, str) for one in (text if isinstance(text, list) else [text])):
        # a request that no rank can read, which fails alone
        return {**asked, "prompts": text}
    return {**asked, "prompts": [encode(one) for one in text] if isinstance(text, list) else encode(text)}


def _described(result: RequestResult, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    made = result.to_dict()
    return made if decode is None else {**made, "text": [decode(row) for row in made["tokens"]]}


def _text(data: dict[str, Any]) -> Lines:
    results = data["results"]
    count = sum(len(row) for result in results for row in result["tokens"])
    rate = f"{count / data['seconds']:.1f} tokens a second" if count else "no tokens"
    lines: Lines = []
    for result in results:
        shown = result.get("text") or [" ".join(map(str, row)) for row in result["tokens"]]
        if error := result["error"]:
            shown = [f"{error['code']}: {error['reason']}. {error['remedy']}"]
        lines += [f"{result['number']}: {one}" for one in shown]
    rows = {"generated": f"{count} tokens for {len(results)} requests in {seconds_text(data['seconds'])}, {rate}"}
    rows |= {"weights": data["weights"]} if data["weights"] else {}
    each = [(rank["rank"], size(rank["weights"])) for rank in data["ranks"]]
    return [*lines, "", facts(rows), "", table(("rank", "weights of its stage"), each, ("rank",))]
