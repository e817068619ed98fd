"""Capture one step of a decoder, whose caches are inputs and outputs of the graph."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from splitkit.checks import is_whole, shown
from splitkit.engine.subgraphs import reduce_to
from splitkit.errors import CaptureError, listed
from splitkit.frontends.capture.capture import capture_forward
from splitkit.frontends.generate_calls import (
    QUERY,
    WITHOUT_SPLIT,
    GenerateCalls,
    cache_like,
    continued_states,
    empty_cache,
    fill,
    in_order,
    model_device,
    not_a_decoder,
)
from splitkit.frontends.trace_settings import as_in_steps
from splitkit.graph.caches import ARGUMENTS, ENCODER_CACHES, caches_of, given_caches, updated_caches
from splitkit.graph.ops.classify import effects_of
from splitkit.graph.ops.facts import PURE
from splitkit.graph.storages import symbols_of

_CROSS = "cross_attention_cache"  # in the names of inputs: keys and values of the encoder's output


def capture_decoder(model: nn.Module, batch: int = 2, tokens: int = 32) -> fx.GraphModule:
    """Return the graph of one step of a transformers decoder: next tokens and KV caches in, logits and caches out.

    ::

        out = gm(input_ids=..., attention_mask=..., position_ids=..., past_key_values=cache,
                 use_cache=True, logits_to_keep=1)
        out.logits, out.past_key_values

    The number of sequences, of tokens in the step and of positions in the caches may differ in every call: the same
    graph runs a prompt with empty caches, a chunk of a prompt, and one token after another. Its inputs are called
    ``input_ids`` ``[sequences, query]``, ``attention_mask`` ``[sequences, positions + query]``, ``position_ids``
    ``[sequences, query]`` and ``past_key_values_...`` ``[sequences, heads, positions, head_dim]``; its outputs are the
    logits of the last token ``[sequences, 1, vocabulary]`` and then the updated caches, in the order of the inputs.

    The decoder of a model with an encoder, such as T5, has the inputs ``decoder_input_ids`` and ``encoder_outputs``,
    and caches of its own positions and of the encoder's. The encoder's caches are returned unchanged; a separate graph
    computes them, which `splitkit.generator` finds in ``gm.meta["encoder_caches"]``.

    A layer with a sliding window also keeps all positions, and masks those outside the window. The model is not
    changed, and may be on ``meta``. Inputs that the model's ``forward`` does not take are left out. Of a model that
    reads images, the graph begins at its language model, with ``inputs_embeds`` ``[sequences, query, hidden]`` and what
    else ``generate`` gives that: for example a mask for each kind of layer, or positions in several rows. Run the graph
    under ``torch.no_grad()``; otherwise each step keeps the autograd graph of the previous one.

    Args:
        model: a transformers model that generates text, in eval mode.
        batch: sequences of the example, for which a plan counts compute and memory.
        tokens: positions that the caches of the example hold after the step.

    Raises:
        CaptureError: SK401 for a model whose step cannot be captured, for example because it has no KV cache, or
            because ``generate`` gives it other inputs in the first step than later.
    """
    for name, value, least in (("batch", batch, 1), ("tokens", tokens, 4)):
        if not is_whole(value, least):
            raise CaptureError("SK401", f"{name} is {shown(value)}", f"Give a whole number of at least {least}.")
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise not_a_decoder(model, "it is not a model of transformers", "Capture it with splitkit.capture.")
    if not hasattr(model, "generate"):
        remedy = "Give the class with a head for tokens, such as LlamaForCausalLM in place of LlamaModel."
        raise not_a_decoder(model, "it has no generate", remedy)
    if model.training:
        raise CaptureError(
            "SK401", "the model is in training mode, in which dropout changes the tokens", "Call model.eval()."
        )
    if not getattr(model.config, "is_encoder_decoder", False):
        return _with_caches(model, example_step(model, batch, tokens))
    gm = _with_caches(model, example_with_encoder(model, batch, tokens, filled=True))
    _require_mask_of_encoder(model, gm)
    note_encoder_caches(gm, _captured(model, example_with_encoder(model, batch, tokens, filled=False)))
    return gm


def _with_caches(model: nn.Module, step: Mapping[str, Any]) -> fx.GraphModule:
    gm = _captured(model, step)
    if not caches_of(gm):
        raise not_a_decoder(model, "it does not return the cache that it was given")
    return gm


def _require_mask_of_encoder(model: nn.Module, gm: fx.GraphModule) -> None:
    """Refuse a model whose mask has the positions that its encoder reads, if these are not the positions it returns."""
    given = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    mask = given.get("attention_mask")
    kept = {str(node.meta["val"].shape[2]) for name, node in given.items() if _CROSS in name}
    if mask is not None and mask.users and kept and str(mask.meta["val"].shape[-1]) not in kept:
        raise not_a_decoder(model, "its attention_mask is of what its encoder reads, which is longer than its output")


def _captured(model: nn.Module, step: Mapping[str, Any]) -> fx.GraphModule:
    entered = language_model_entered(model, step) if "inputs_embeds" in step else nullcontext()
    try:
        with (
            model.register_forward_hook(_logits_and_caches),
            torch.no_grad(),
            masked_attention() as not_causal,
            continued_states(model),
            as_in_steps(),
            entered,
        ):
            gm = capture_forward(model, (), dict(step), "export", dynamic=True)
    except CaptureError as error:
        # the remedies for training do not help here
        raise CaptureError("SK401", error.reason, WITHOUT_SPLIT) from error
    mask = step.get("attention_mask")
    if not_causal and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        which = listed(sorted(not_causal), 2)
        why = f"{which} is not causal without a mask, and generate gives none for prompts without padding"
        raise not_a_decoder(model, why)
    if "inputs_embeds" in step:
        drop_unread(gm)
    read_first_sizes(gm)
    return gm


def _logits_and_caches(model: nn.Module, args: Any, output: Any) -> Any:
    """Leave out what a model returns in front of its caches besides logits, such as Moshi's last hidden state."""
    names = list(output) if isinstance(output, dict) else []
    before = names[: next((i for i, name in enumerate(names) if name in ARGUMENTS), 0)]
    if before in ([], ["logits"]):
        return output
    return type(output)(**{name: x for name, x in output.items() if name == "logits" or name not in before})


# Read each size from the first input that has it; export may read it from the cache of any layer.


def read_first_sizes(gm: fx.GraphModule) -> None:
    """Let nodes that read the size of an input read it from the first input with that size; in place."""
    first = dict[str, tuple[fx.Node, int]]()
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            first.setdefault(str(size), (node, dim))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if node.args[0].op == "placeholder":
            node.args = first[str(node.meta["val"])]
    gm.recompile()


# Capture what a decoder computes once from an encoder's output: its keys and values for each layer.


def note_encoder_caches(gm: fx.GraphModule, whole: fx.GraphModule) -> None:
    """Note in ``gm.meta`` the graph that computes the caches which the graph of a step returns as it is given them.

    Args:
        gm: the graph of a step with all caches as inputs.
        whole: the graph of the same step without those caches among the inputs; it is reduced, in place, to the nodes
            that compute them.
    """
    given = {*given_caches(whole)}
    wanted = tuple(node for node in updated_caches(whole) if given.isdisjoint(node.all_input_nodes))
    reduce_to(whole.graph, wanted)
    # plain arguments and results, and no check of the model's arguments
    whole.graph.set_codegen(fx.graph.CodeGen())
    gm.meta[ENCODER_CACHES] = fx.GraphModule(whole, whole.graph)


# Lets a model with images be captured from its language model on: with the arguments that this is given.


_OF_THE_WHOLE = (*ARGUMENTS, "use_cache", "logits_to_keep")


@contextmanager
def language_model_entered(model: Any, step: Mapping[str, Any]) -> Iterator[None]:
    """Let a model's ``forward`` take the arguments of its language model, whatever it computes in front of that.

    Args:
        model: the model.
        step: arguments with these names: the language model's, and caches and settings.
    """
    decoder = model.get_decoder()
    whole, inner, own = model.forward, decoder.forward, inspect.signature(decoder.forward)
    taken = inspect.signature(whole).parameters
    given: dict[str, Any] = {}

    def forward(**arguments: Any) -> Any:
        given.update({name: x for name, x in arguments.items() if name not in _OF_THE_WHOLE})
        # nothing that is computed in front of the language model is read; it has to run like a prompt of text
        embeds = arguments["inputs_embeds"]
        ids = embeds.new_zeros(embeds.shape[:2], dtype=torch.long)
        named = {name: arguments[name] for name in ("position_ids", *_OF_THE_WHOLE) if name in arguments}
        return whole(input_ids=ids, **{name: x for name, x in named.items() if name in taken})

    def enter(*args: Any, **arguments: Any) -> Any:
        return inner(**{**own.bind_partial(*args).arguments, **arguments, **given})

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in step]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    try:
        with patch.object(model, "forward", forward), patch.object(decoder, "forward", enter):
            yield
    finally:
        given.clear()


def drop_unread(gm: fx.GraphModule) -> None:
    """Remove ops that nothing reads from a graph, in place: the ops in front of the language model."""
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and replace(effects_of(node, gm), aliases=()) == PURE:
            gm.graph.erase_node(node)
    gm.recompile()


# Make the inputs of one step of a decoder that reads what an encoder has computed.


def example_with_encoder(model: nn.Module, batch: int, tokens: int, filled: bool) -> dict[str, Any]:
    """Return keyword inputs: ``QUERY`` tokens, caches of the positions before them, and the output of an encoder.

    Args:
        model: an encoder and decoder, such as T5.
        batch: sequences.
        tokens: positions in the caches and of the step together, and those of the encoder, if it may have any number.
        filled: whether the keys and values of the encoder's output are in the cache, and not to be computed.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    config: Any = model.config
    device, width = model_device(model), _encoder_width(model)
    dtype = getattr(model, "dtype", torch.float32)
    length = getattr(config, "max_source_positions", tokens)

    def encoded(sequences: int, positions: int, kind: Any) -> Any:
        hidden = torch.zeros(sequences, positions, width, dtype=dtype, device=device)
        mask = torch.ones(sequences, positions, dtype=torch.long, device=device)
        return kind(hidden, **({"attention_mask": mask} if _has_mask(kind) else {}))

    def layers_of(kind: Any) -> list[list[Any]]:
        own, crossed = DynamicCache(), DynamicCache()
        one = torch.zeros(1, 1, dtype=torch.long, device=device)
        first = {"decoder_input_ids": one, "encoder_outputs": encoded(1, 1, kind)}
        return fill(model, {**first, "past_key_values": EncoderDecoderCache(own, crossed)}, own, crossed)

    refused: CaptureError | None = None
    for kind in _encoder_outputs(model):
        try:
            kept, cross = layers_of(kind)
            break
        except CaptureError as error:
            refused = refused or error
    else:
        assert refused is not None
        raise refused
    past = tokens - QUERY
    given = cache_like(cross, batch, length, device) if filled else DynamicCache()
    known = {
        "decoder_input_ids": torch.zeros(batch, QUERY, dtype=torch.long, device=device),
        "encoder_outputs": encoded(batch, length, kind),
        "attention_mask": torch.ones(batch, length, dtype=torch.long, device=device),
        "decoder_attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "decoder_position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
        "logits_to_keep": 1,
        "past_key_values": EncoderDecoderCache(cache_like(kept, batch, past, device), given),
        "use_cache": True,
    }
    if _has_mask(kind):
        del known["attention_mask"]  # of what the encoder reads

    def cache_of(sequences: int, positions: int) -> Any:
        meta = torch.device("meta")
        return EncoderDecoderCache(
            cache_like(kept, sequences, positions, meta), cache_like(cross, sequences, length, meta)
        )

    calls = GenerateCalls(model, "past_key_values", lambda sequences: encoded(sequences, length, kind))
    return in_order(model, known, calls.step(batch, tokens, cache_of))


def _encoder_outputs(model: Any) -> list[Any]:
    """Return the classes of what an encoder may return, the usual one first: some decoders read a further field."""
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.utils.generic import ModelOutput

    known = vars(sys.modules[type(model.get_encoder()).__module__]).values()
    fields = {
        kind: inspect.signature(kind).parameters
        for kind in known
        if isinstance(kind, type) and issubclass(kind, ModelOutput)
    }
    own = [kind for kind, names in fields.items() if "last_hidden_state" in names and "past_key_values" not in names]
    return [*dict.fromkeys([BaseModelOutput, *own])]


def _has_mask(kind: Any) -> bool:
    """Whether an encoder's output has a mask of its own positions."""
    return "attention_mask" in inspect.signature(kind).parameters


def _encoder_width(model: Any) -> int:
    own = getattr(model.get_encoder(), "config", model.config)
    for config in (own, own.get_text_config(), model.config):
        for name in ("d_model", "hidden_size"):
            if isinstance(width := getattr(config, name, None), int):
                return width
    raise not_a_decoder(model, "its configuration does not say how wide the output of its encoder is")


# Attention that is captured for every number of tokens: with a mask, and without a branch for a single token.
#
# transformers' ``sdpa`` asks whether there is more than one token before it looks whether there is a mask, and groups
# heads in another way for a single token. Export would take the answer for granted in all calls of the graph.


@contextmanager
def masked_attention() -> Iterator[set[str]]:
    """Let transformers' models compute ``sdpa`` attention by `_masked` where that is the same.

    Yields:
        The classes of attention to earlier tokens that without a mask is not causal.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before, not_causal = functions["sdpa"], set[str]()

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if (attention_mask is None and causal) or options.get("softcap") is not None:
            found: tuple[torch.Tensor, None] = before(module, query, key, value, attention_mask, **options)
            return found
        if not causal and attention_mask is not None:
            # an encoder's output has no positions of this step
            own = {*symbols_of(query.shape[2])}.intersection(symbols_of(attention_mask.shape[-1]))
            not_causal.update([type(module).__name__] if own else [])
        return _masked(module, query, key, value, attention_mask, **options), None

    functions["sdpa"] = attend
    try:
        yield not_causal
    finally:
        # the entry of the instance, which hides that of the class
        del functions["sdpa"]
        if functions["sdpa"] is not before:
            functions["sdpa"] = before


def _masked(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the attention, ``[sequences, query, heads, head_dim]``."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if position_bias is not None:
        attention_mask = _with_bias(position_bias, attention_mask, torch.finfo(key.dtype).min)
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).contiguous()


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None, lowest: float) -> torch.Tensor:
    if mask is None:
        return bias.contiguous()
    return (torch.where(mask, bias, lowest) if mask.dtype == torch.bool else bias + mask).contiguous()


# Make example inputs of one step of a transformers decoder, for its capture.


def example_step(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Return keyword inputs of a causal language model: ``QUERY`` tokens, and caches of the positions before them.

    Args:
        model: the model.
        batch: sequences.
        tokens: positions in the caches and of the step together.

    Raises:
        CaptureError: SK401 for a model that has caches of other kinds.
    """
    device, cache, parameters = model_device(model), empty_cache(model), inspect.signature(model.forward).parameters
    kept = next((argument for argument in ARGUMENTS if argument in parameters), ARGUMENTS[0])
    # with images, the tokens are embedded before the step
    embedded = model.config.get_text_config(decoder=True) is not model.config
    calls = GenerateCalls(model, kept, embedded=embedded)
    (layers,) = fill(model, {**calls.prompt(), kept: cache}, cache)
    past = tokens - QUERY
    further = calls.step(batch, tokens, functools.partial(cache_like, layers, device=torch.device("meta")))
    known = {
        "input_ids": torch.zeros(batch, QUERY, dtype=torch.long, device=device),
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long, device=device),
        "position_ids": torch.arange(past, tokens, device=device).expand(batch, QUERY).contiguous(),
    }
    shared = {kept: cache_like(layers, batch, past, device), "use_cache": True}
    shared |= {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    if not embedded:
        return in_order(model, {**known, **shared}, further)
    if (positions := further.get("position_ids")) is not None and positions.shape == (1, QUERY):
        # the same for all sequences
        further["position_ids"] = positions.expand(batch, QUERY).contiguous()
    return {**further, **shared}
