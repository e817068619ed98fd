"""Capture one step of a decoder, whose caches are inputs and outputs of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from splitkit.checks import is_whole, shown
from splitkit.errors import CaptureError, listed
from splitkit.frontends.capture.capture import capture
from splitkit.frontends.decoder.capture_encoder_caches import note_encoder_caches
from splitkit.frontends.decoder.example_caches import WITHOUT_SPLIT, not_a_decoder
from splitkit.frontends.decoder.example_step import example_step
from splitkit.frontends.decoder.example_with_encoder import example_with_encoder
from splitkit.frontends.decoder.first_sizes import read_first_sizes
from splitkit.frontends.decoder.language_model_step import drop_unread, language_model_entered
from splitkit.frontends.decoder.masked_attention import masked_attention
from splitkit.frontends.decoder.recurrent_states import continued_states
from splitkit.frontends.trace_settings import without_result_cache, without_special_sizes
from splitkit.graph.caches import ARGUMENTS, caches_of

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
    handle = model.register_forward_hook(_logits_and_caches)
    try:
        with (
            torch.no_grad(),
            masked_attention() as not_causal,
            continued_states(model),
            without_special_sizes(),
            without_result_cache(),
            entered,
        ):
            gm = capture(model, dynamic=True, **step)
    except CaptureError as error:
        # the remedies for training do not help here
        raise CaptureError("SK401", error.reason, WITHOUT_SPLIT) from error
    finally:
        handle.remove()
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
