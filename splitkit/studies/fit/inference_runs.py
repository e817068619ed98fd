"""Runs a generation step of a model on ``meta``: the bytes of each block's cache and activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from splitkit._torch import pytree
from splitkit.errors import CaptureError
from splitkit.frontends.decoder.recurrent_states import continued_states
from splitkit.studies.fit.blocks import ModelBlock
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.meta_watch import BlockWatch, on_meta
from splitkit.testing.config_models import main_input


@dataclass(frozen=True)
class StepBytes:
    """What the blocks hold in one step, in the order of the blocks.

    Attributes:
        cache: bytes of each block's cache after the step.
        work: the most bytes alive beside weights and caches while each block runs.
        order: the numbers of the blocks in the order in which they run.
    """

    cache: tuple[int, ...]
    work: tuple[int, ...]
    order: tuple[int, ...]


def inference_step(
    subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, requests: int, chunk: int
) -> StepBytes:
    """Run the step that completes caches of so many tokens.

    A decoder computes the last ``chunk`` tokens of all requests together, at least one of each. An encoder-decoder
    encodes (speech of full length, or as many tokens of text), and then decodes one token after the others.

    Args:
        subject: the model.
        blocks: its blocks.
        tokens: the tokens of each request.
        requests: the number of requests.
        chunk: the most tokens that a step computes.

    Raises:
        CaptureError: SK401 if the model does not run on ``meta``.
    """
    try:
        with torch.no_grad(), on_meta():
            return _step(subject, blocks, tokens, requests, chunk)
    except CaptureError:
        raise
    except Exception as error:
        needs = "Give a factory that returns the model and inputs with which it runs."
        raise subject.failed("run", f"{requests} x {tokens} tokens", error, needs) from error


def _step(subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, requests: int, chunk: int) -> StepBytes:
    model = subject.in_mode(training=False)
    if subject.example is not None:
        args, kwargs = subject.example
        return _one_run(blocks, lambda: model(*args, **kwargs), (args, kwargs))
    if not getattr(model, "can_generate", lambda: False)():
        inputs = {getattr(model, "main_input_name", "input_ids"): main_input(model, subject.config, requests, tokens)}
        return _one_run(blocks, lambda: model(**inputs), inputs)
    if subject.config.is_encoder_decoder:
        return _encode_and_decode(subject, blocks, tokens, requests)
    with continued_states(model):
        return _decode(subject, blocks, tokens, requests, min(tokens, max(1, chunk // requests)))


def _one_run(blocks: Sequence[ModelBlock], work: Any, inputs: Any) -> StepBytes:
    watch = _watch(blocks, None, inputs)
    watch.run(work)
    none = (0,) * len(blocks)
    return StepBytes(none, _work(watch, none, none), running_order(watch.order, len(blocks)))


def _decode(subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, requests: int, new: int) -> StepBytes:
    model = subject.model
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    owners = _owners(subject, blocks)
    cache, before = None, (0,) * len(blocks)
    if tokens > new:
        ids = torch.zeros(requests, tokens - new, dtype=torch.long)
        cache = _cache_of(subject, model(input_ids=ids, use_cache=True, **last))
        before = _cache_bytes(cache, owners, len(blocks))
    given = {_cache_name(model): cache} if cache is not None else {}
    ids = torch.zeros(requests, new, dtype=torch.long)
    watch = _watch(blocks, cache, ids)
    output = watch.run(lambda: model(input_ids=ids, use_cache=True, **given, **last))
    after = _cache_bytes(_cache_of(subject, output), owners, len(blocks))
    return StepBytes(after, _work(watch, before, after), running_order(watch.order, len(blocks)))


def _encode_and_decode(subject: FitModel, blocks: Sequence[ModelBlock], tokens: int, requests: int) -> StepBytes:
    model, owners, none = subject.model, _owners(subject, blocks), (0,) * len(blocks)
    name = getattr(model, "main_input_name", "input_ids")
    main = {name: main_input(model, subject.config, requests, tokens)}
    first = torch.zeros(requests, 1, dtype=torch.long)
    encoding = _watch(blocks, None, (main, first))
    output = encoding.run(lambda: model(**main, decoder_input_ids=first, use_cache=True))
    started = _cache_bytes(_cache_of(subject, output), owners, len(blocks))
    work = _work(encoding, none, started)
    if tokens == 1:
        return StepBytes(started, work, running_order(encoding.order, len(blocks)))
    encoded = (output.encoder_last_hidden_state,)
    ids = torch.zeros(requests, tokens - 1, dtype=torch.long)
    cache = _cache_of(subject, model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True))
    before = _cache_bytes(cache, owners, len(blocks))
    watch = _watch(blocks, cache, (encoded, first))
    output = watch.run(
        lambda: model(encoder_outputs=encoded, decoder_input_ids=first, past_key_values=cache, use_cache=True)
    )
    after = _cache_bytes(_cache_of(subject, output), owners, len(blocks))
    return StepBytes(
        after, tuple(map(max, work, _work(watch, before, after))), running_order(encoding.order, len(blocks))
    )


def _watch(blocks: Sequence[ModelBlock], cache: Any, inputs: Any) -> BlockWatch:
    """Return a watch for a run with this cache and these inputs."""
    watch = BlockWatch(blocks)
    for block in blocks:
        watch.hold("weights", [*block.module.parameters(), *block.module.buffers()])
    watch.hold("cache", _cached(cache))
    watch.hold("inputs", _tensors(inputs))
    return watch


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def running_order(called: Sequence[int], count: int) -> tuple[int, ...]:
    """Return all blocks as they ran; one that did not run comes before the next one that did, as defined.

    Args:
        called: the blocks that ran, by their first call.
        count: the number of blocks.
    """
    rank = {number: position for position, number in enumerate(called)}
    keys, following = [], len(rank)
    for number in reversed(range(count)):
        following = rank.get(number, following)
        keys.append((following, number in rank, number))
    return tuple(number for *_, number in sorted(keys))


def _work(watch: BlockWatch, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the most bytes alive during each block, without weights and caches.

    While a block runs, the caches of blocks that ran already have their new size, as does its own.
    """
    alive, found, seen = watch.alive("weights"), [0] * len(before), set[int]()
    for number, start, end in watch.spans():
        seen.add(number)
        cached = sum(after[i] if i in seen else before[i] for i in range(len(before)))
        found[number] = max(found[number], max(alive[start:end], default=0) - cached)
    return tuple(found)


def _cache_name(model: Any) -> str:
    names = signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


def _cache_of(subject: FitModel, output: Any) -> Any:
    """Return the cache in an output.

    Raises:
        CaptureError: SK401 if there is none whose layers can be told.
    """
    found = getattr(output, "past_key_values", None)
    found = getattr(output, "cache_params", None) if found is None else found
    if found is None or not _layered(found):
        raise CaptureError(
            "SK401",
            f"the cache of {subject.name} is a {type(found).__name__}, which has no layers",
            "Give a factory that returns the model and the inputs of its largest step.",
        )
    return found


def _layered(cache: Any) -> list[tuple[int, Any]]:
    """Return (number of the layer, what it caches) of a cache, with the caches of cross-attention."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    several = [part for part in parts if part is not None] or [cache]
    return [(number, layer) for part in several for number, layer in enumerate(getattr(part, "layers", ()))]


def _cached(cache: Any) -> list[Tensor]:
    return [] if cache is None else [tensor for _, layer in _layered(cache) for tensor in _tensors_of(layer)]


def _tensors_of(layer: Any) -> list[Tensor]:
    return [one for one in _tensors([*vars(layer).values()]) if one.ndim]


def _cache_bytes(cache: Any, owners: Mapping[int, int], blocks: int) -> tuple[int, ...]:
    """Return the bytes of the cache of each block, each memory once."""
    found, seen = [0] * blocks, set[int]()
    for number, layer in _layered(cache):
        for tensor in _tensors_of(layer):
            storage = tensor.untyped_storage()
            if id(storage) not in seen:
                seen.add(id(storage))
                found[owners[number]] += storage.nbytes()
    return tuple(found)


def _owners(subject: FitModel, blocks: Sequence[ModelBlock]) -> dict[int, int]:
    """Return number of a layer in the cache -> the block with the module of that ``layer_idx``."""
    found: dict[int, int] = {}
    decodes = [i for i, block in enumerate(blocks) if "decoder" in block.name.split(".")]
    for i in decodes if subject.config.is_encoder_decoder and decodes else range(len(blocks)):
        for module in blocks[i].module.modules():
            if isinstance(number := getattr(module, "layer_idx", None), int):
                found.setdefault(number, i)
    return found
