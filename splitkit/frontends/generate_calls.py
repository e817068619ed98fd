"""See what transformers' ``generate`` gives a model's ``forward``, or its language model, without running the model.

Models differ in this: positions in several rows, a mask for each kind of layer, embeddings for each layer. So a step is
captured with what the model's own ``generate`` gives, and a model is refused if that differs between its steps.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from splitkit._torch import FakeTensorMode, pytree
from splitkit.errors import CaptureError, listed
from splitkit.frontends.capture.capture import silenced
from splitkit.frontends.capture.capture_errors import construct_of
from splitkit.frontends.capture.first_call import attributes_restored
from splitkit.frontends.output_classes import has_states
from splitkit.frontends.trace_settings import as_in_export
from splitkit.graph.caches import ARGUMENTS, DEEPSTACK
from splitkit.graph.ops.state_scans import CHUNKED_SCAN, LIMITED_STEPS, SELECTIVE_SCAN
from splitkit.graph.storages import symbols_of
from splitkit.language_model import given_to_language_model

QUERY = 3
"""Tokens of the step; more than one, so that no branch for a single token is taken."""
_SETTINGS = {"use_cache", "return_dict", "logits_to_keep", "cache_position"}
_OF_ANY_MODEL = {"input_ids", "labels", "token_type_ids", "head_mask", "cross_attn_head_mask", *_SETTINGS}
_OF_ANY_MODEL |= {"encoder_hidden_states", "encoder_attention_mask", "attention_mask", "position_ids"}

_MADE = ("attention_mask", "position_ids", "decoder_attention_mask", "decoder_position_ids")
"""What a step makes itself if it is not given; a step of Mamba has no mask after the prompt."""


class _Output(dict[str, Any]):
    """An output of a model that has everything it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@dataclass(frozen=True)
class GenerateCalls:
    """The calls of a model's ``generate`` for prompts of text.

    Attributes:
        model: the model.
        caches: the name of the argument for caches.
        encoded: makes the output of an encoder for so many sequences, if the model has one.
        embedded: whether a step reads embeddings: then it is given what reaches the language model.
    """

    model: Any
    caches: str
    encoded: Callable[[int], Any] | None = None
    embedded: bool = False

    @property
    def _tokens(self) -> str:
        return "input_ids" if self.encoded is None else "decoder_input_ids"

    def prompt(self) -> dict[str, Any]:
        """Return the arguments of ``forward`` for a prompt of `QUERY` tokens, but for caches; tensors are zeros.

        Raises:
            CaptureError: SK401 for a model whose ``generate`` fails, or does not call its ``forward``.
        """
        (first,) = self._run(1, QUERY, 0, 1, lambda sequences, positions: None)
        given = {name: x for name, x in first.items() if name not in (self.caches, *_SETTINGS)}
        return dict(self._zeros(given))

    def step(self, batch: int, tokens: int, cache_of: Callable[[int, int], Any]) -> dict[str, Any]:
        """Return the arguments of a step of `QUERY` tokens but for tokens, caches and settings; tensors are zeros.

        Args:
            batch: sequences.
            tokens: positions in the caches and of the step together.
            cache_of: makes a cache of so many sequences and positions.

        Raises:
            CaptureError: SK401 for a model of which one graph cannot run all steps.
        """
        runs = (batch, tokens, tokens - QUERY, 2), (batch, QUERY, 0, 1)
        calls = [call for run in runs for call in self._run(*run, cache_of)]
        several, one, first = (_further(self._reached(call) if self.embedded else call) for call in calls)
        for name in sorted({*several, *one, *first}):
            kinds = dict.fromkeys(_kind(call.get(name)) for call in (first, several, one))
            if name in _MADE and (name in several or not self.embedded):
                kinds.pop(_kind(None), None)
            if len(kinds) > 1:
                why = f"generate gives it {name} as {' and then as '.join(kinds)}, and one graph runs all steps"
                raise not_a_decoder(self.model, why)
            leaves = pytree.tree_leaves(several.get(name))
            if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise not_a_decoder(self.model, f"generate gives it {name}, which is {next(iter(kinds))}")
        if self.embedded:
            several |= self._deepstack(several)
            self._require_no_more(several)
        return dict(self._zeros(several))

    def _zeros(self, given: Any) -> Any:
        device = model_device(self.model)
        return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device), given)

    def _deepstack(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Return what DeepStack adds to hidden states where images are, if the language model takes it.

        A prompt of text has none; as many rows of features as tokens stand for any number.
        """
        taken = inspect.signature(self.model.get_decoder().forward).parameters
        layers = getattr(getattr(self.model.config, "vision_config", None), "deepstack_visual_indexes", None)
        if layers is None or not taken.keys() >= {*DEEPSTACK}:
            return {}
        hidden = step["inputs_embeds"]
        seen, features = (hidden.new_ones(hidden.shape[:2], dtype=torch.bool), hidden.flatten(0, 1))
        return dict(zip(DEEPSTACK, (seen, [features.clone() for _ in layers]), strict=True))

    def _require_no_more(self, step: Mapping[str, Any]) -> None:
        """Refuse a language model that also reads what only a prompt with images brings."""
        if "inputs_embeds" not in step:
            raise not_a_decoder(self.model, "its language model reads tokens, and images in another way")
        named = inspect.signature(self.model.get_decoder().forward).parameters.values()
        names = [p.name for p in named if p.kind is not p.VAR_KEYWORD and not p.name.startswith("output_")]
        if more := [name for name in names if name not in (*step, *_OF_ANY_MODEL, *ARGUMENTS)]:
            raise not_a_decoder(self.model, f"with images, its language model also reads {listed(more, 3)}")

    def _run(
        self, batch: int, tokens: int, past: int, new: int, cache_of: Callable[[int, int], Any]
    ) -> list[dict[str, Any]]:
        """Return what each call is given, for prompts of which some tokens are in the caches."""
        from transformers import GenerationConfig
        from transformers.generation.utils import GenerationMixin

        calls: list[dict[str, Any]] = []
        shell = self._shell(calls, past, cache_of)
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        mask = torch.ones_like(ids)
        # generate drops a mask without padding
        mask[:, 0] = 0
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        generate = type(self.model).generate
        if self.encoded is not None:
            given = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "encoder_outputs": self.encoded(batch)}
            # its own may first prepare what the encoder reads
            generate = GenerationMixin.generate
        if past:
            given[self.caches] = cache_of(batch, past)
        tokens_of = {"pad_token_id": 0, "bos_token_id": 0, "decoder_start_token_id": 0}
        settings: Any = GenerationConfig
        shell.generation_config = settings(max_new_tokens=new, do_sample=False, use_cache=True, **tokens_of)
        try:
            with silenced(), torch.no_grad(), attributes_restored(self.model):
                generate(shell, **given)
        except Exception as error:
            why = f"its generate, given a prompt of text, fails: {construct_of(error)}"
            raise not_a_decoder(self.model, why) from error
        if len(calls) != new:
            raise not_a_decoder(self.model, f"its generate calls its forward {len(calls)} times for {new} tokens")
        if new > 1 and calls[-1][self._tokens].shape[1] != 1:
            raise not_a_decoder(self.model, "its generate gives it all tokens in each step, also those in the caches")
        return calls

    def _shell(self, calls: list[dict[str, Any]], past: int, cache_of: Callable[[int, int], Any]) -> Any:
        """Return a model of the same class whose ``forward`` notes its arguments, and computes nothing."""
        kind, signature, seen = type(self.model), inspect.signature(type(self.model).forward), past

        @functools.wraps(kind.forward)
        def forward(shell: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            given = signature.bind(shell, *args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            del given[next(iter(signature.parameters))]
            ids = given[self._tokens]
            seen += ids.shape[1]
            calls.append(given)
            return _Output({"logits": torch.zeros(len(ids), 1, 1), self.caches: cache_of(len(ids), seen)})

        own = {"forward": forward, "device": property(lambda shell: torch.device("cpu")), "__module__": kind.__module__}
        made: Any = type(f"Observed{kind.__name__}", (kind,), own)
        shell = made.__new__(made)
        shell.__dict__.update(vars(self.model))
        return shell

    def _reached(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what reaches the language model, as fake tensors."""
        # as in export, a mask is made also where attention could do without
        with attributes_restored(self.model), FakeTensorMode(allow_non_fake_inputs=True), as_in_export():
            fake = self._zeros({name: x for name, x in given.items() if name != self.caches})
            return given_to_language_model(self.model, {**fake, self.caches: given.get(self.caches)})


def in_order(model: Any, known: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a model's ``forward`` takes in the order of its signature, as export wants them.

    Args:
        model: the model.
        known: arguments of steps in general; what ``forward`` does not take is left out.
        further: what `GenerateCalls.step` returns; it counts for what is not known.
    """
    named = inspect.signature(model.forward).parameters
    given = {**further, **known}
    return {name: given[name] for name in (*named, *(further.keys() - named.keys())) if name in given}


def _further(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a call is given, but for tokens, caches and settings."""
    left_out = {*_SETTINGS, *ARGUMENTS, "input_ids", "decoder_input_ids", "encoder_outputs"}
    return {
        name: x
        for name, x in given.items()
        if name not in left_out and any(leaf is not None and leaf is not False for leaf in pytree.tree_leaves(x))
    }


def _kind(value: Any) -> str:
    """Say what one graph may not be given different ones of: the number of dimensions and the dtype of each tensor."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    return ", ".join(f"{pytree.keystr(path)} {_kind_of_leaf(leaf)}".strip() for path, leaf in leaves)


def _kind_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of {leaf.ndim} dimensions"
    return "nothing" if leaf is None else f"a {type(leaf).__name__}"


# Make caches for an example: with the layers and sizes of those that a model fills itself.


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def empty_cache(model: Any) -> Any:
    """Return an empty cache for a model, in which every layer with keys keeps all positions."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    new_layer: Any = DynamicLayer
    cache, known = DynamicCache(), DynamicCache(config=model.config).layers
    if any(map(has_states, known)):
        cache.layers = [layer if has_states(layer) or _is_dummy(layer) else new_layer() for layer in known]
    return cache


def cache_like(layers: list[Any], batch: int, positions: int, device: torch.device) -> Any:
    """Return a ``DynamicCache`` of zeros with the layers of another one: heads, sizes and dtypes, which may differ."""
    from transformers import DynamicCache

    def zeros(like: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.zeros(batch, *sizes, dtype=like.dtype, device=device)

    cache = DynamicCache()
    cache.layers = []
    for layer in layers:
        new = copy.copy(layer)
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            pair = layer.keys, layer.values
            new.keys, new.values = (zeros(x, x.shape[1], positions, x.shape[3]) for x in pair)
        if has_states(layer):
            new.conv_states, new.recurrent_states = (
                {i: state if state is None else zeros(state, *state.shape[1:]) for i, state in table.items()}
                for table in (layer.conv_states, layer.recurrent_states)
            )
        cache.layers.append(new)
    return cache


def fill(model: nn.Module, inputs: Mapping[str, Any], *caches: Any) -> list[list[Any]]:
    """Run a model on inputs that hold empty caches, on fake tensors or on ``meta``, and return the layers of each.

    Raises:
        CaptureError: SK401 for a model that does not run, or that puts other things into a cache.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with attributes_restored(model), torch.no_grad(), as_in_export(), fake, continued_states(model) as states:
        try:
            model(**inputs, use_cache=True)
        except Exception as error:
            why = f"called with {', '.join(inputs)}, it fails: {construct_of(error)}"
            raise not_a_decoder(model, why) from error
    if not all(cache.layers for cache in caches):
        raise not_a_decoder(model, "it puts no keys and values into past_key_values, as models with other states do")
    if states.refused:
        raise not_a_decoder(model, states.refused)
    for layer in (layer for cache in caches for layer in cache.layers):
        if not (isinstance(getattr(layer, "keys", None), torch.Tensor) or has_states(layer) or _is_dummy(layer)):
            raise not_a_decoder(model, "it keeps other things than keys and values of each layer in its cache")
    return [list(cache.layers) for cache in caches]


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"


WITHOUT_SPLIT = 'Generate with model.generate; of a model loaded with device_map="auto", layers are on several devices.'


def not_a_decoder(model: nn.Module, why: str, remedy: str = WITHOUT_SPLIT) -> CaptureError:
    """Return the error for a model whose step cannot be captured."""
    return CaptureError(
        "SK401",
        f"{type(model).__name__} cannot be captured as a decoder: {why}",
        remedy,
    )


# Recurrent states that are captured for every number of tokens: mixers go on from the state that they are given.
#
# The mixers of transformers have a branch for a single token, which writes the states in place, and one for prompts,
# which in Mamba begins with an empty state. In a capture they take the second one, with a scan that reads the state::
#
#     state = cache.get_recurrent_state(layer)      y, state' = selective_scan(x, .., state)      cache.update(state')


_NO_LIMIT = (0.0, float("inf"))


class _LastState:
    """The recurrent state that a mixer has read, until its scan takes it.

    Attributes:
        refused: why a mixer cannot be captured; empty if all can.
        before: the tokens in the cache before the step, a number or a symbol; ``None`` if the cache does not say.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._cache: Any = None
        self._scans, self.refused = 0, ""
        self.before: int | torch.SymInt | None = None

    def read(self, cache: Any, state: torch.Tensor | None) -> torch.Tensor | None:
        """Note the state that a mixer reads."""
        if cache is not self._cache:
            # the first mixer of a run, before which the last attention has not run
            self._cache, self.before = cache, _positions(cache)
        self._state, self._scans = state, 0
        return state

    def take(self, dims: int) -> torch.Tensor | None:
        """Return the state for a scan; of Zamba, each head has a scan of its own."""
        state, self._scans = self._state, self._scans + 1
        return state if state is None or state.dim() == dims else state[:, self._scans - 1]

    def written(self) -> None:
        """Note that a mixer writes its state."""
        if not self._scans:
            self.refused = "it computes a state from token to token in a way that is neither Mamba's nor Mamba-2's"
        self._state, self._scans = None, 0


@contextmanager
def continued_states(model: nn.Module) -> Iterator[_LastState]:
    """Let the mixers of a model go on from the states in the cache, whatever the number of tokens.

    Yields:
        An object whose ``refused`` says afterwards why the model has mixers that cannot be captured.
    """
    from transformers.cache_utils import Cache, LinearAttentionLayer

    last = _LastState()
    read = Cache.get_recurrent_state

    def get(self: Any, layer_idx: int, state_idx: int = 0) -> Any:
        return last.read(self, read(self, layer_idx, state_idx))

    def update(self: Any, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        last.written()
        return _set_recurrent_state(self, recurrent_states, state_idx)

    changed: list[tuple[Any, str, Any]] = [
        (Cache, "get_recurrent_state", get),
        (LinearAttentionLayer, "update_recurrent_state", update),
        (LinearAttentionLayer, "update_conv_state", _update_conv_state),
    ]
    own = {"mamba_selective_scan": _selective(last), "mamba2_chunk_scan": _chunked(last)}
    own["apply_mask_to_padding_states"] = _without_padding
    for file in {type(module).__module__ for module in model.modules()}:
        source = sys.modules[file]
        changed += [(source, name, function) for name, function in own.items() if name in vars(source)]
    with ExitStack() as patches:
        for change in changed:
            patches.enter_context(patch.object(*change))
        yield last


def _positions(cache: Any) -> int | torch.SymInt | None:
    """Return the positions of the last layer with keys; ``None`` without one, or if it holds those of this step."""
    layer = next((layer for layer in reversed(cache.layers) if hasattr(layer, "get_seq_length")), None)
    if layer is None:
        return None
    count: Any = layer.keys.shape[2] if isinstance(layer.keys, torch.Tensor) and layer.keys.dim() == 4 else 0
    return count if isinstance(count, int) or len(symbols_of(count)) == 1 else None


def _set_recurrent_state(layer: Any, state: torch.Tensor, i: int) -> torch.Tensor:
    before = layer.recurrent_states[i]
    layer.dtype, layer.device = layer.dtype or state.dtype, layer.device or state.device
    same = before is None or before.dtype == state.dtype
    layer.recurrent_states[i] = state if same else state.to(before.dtype)
    layer.is_recurrent_states_initialized[i] = True
    kept: torch.Tensor = layer.recurrent_states[i]
    return kept


def _update_conv_state(
    layer: Any, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
) -> torch.Tensor:
    """Do what a layer of transformers does, but make a new state instead of writing the old one."""
    before = layer.conv_states[state_idx]
    width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
    if before is not None and layer.has_previous_state[state_idx]:
        whole = torch.cat([before, conv_states], dim=-1)
    else:
        whole = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
    layer.dtype, layer.device = layer.dtype or conv_states.dtype, layer.device or conv_states.device
    layer.conv_states[state_idx] = whole[..., -width:].to(whole.dtype if before is None else before.dtype, copy=True)
    layer.conv_kernel_size[state_idx] = width
    layer.is_conv_states_initialized[state_idx] = layer.has_previous_state[state_idx] = True
    return whole


def _without_padding(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Set padding to zero, by the last columns of a mask for all positions."""
    if attention_mask is None:
        return hidden_states
    mask = attention_mask[:, -hidden_states.shape[1] :, None]
    return (hidden_states * mask).to(hidden_states.dtype)


def _selective(last: _LastState) -> Callable[..., Any]:
    """Return what replaces transformers' ``mamba_selective_scan``; sizes as there."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        state = last.take(3)
        if state is None:
            state = hidden_states.new_zeros((*hidden_states.shape[:2], A.shape[-1]), dtype=torch.float)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = nn.functional.softplus(dt) if delta_softplus else dt
        out, state = SELECTIVE_SCAN(hidden_states, dt, A, B.transpose(1, 2), C.transpose(1, 2), state)
        out = out if D is None else out + hidden_states * D[None, :, None]
        out = out if z is None else out * nn.functional.silu(z)
        return (out, state) if return_last_state else out

    return scan


def _chunked(last: _LastState) -> Callable[..., Any]:
    """Return what replaces transformers' ``mamba2_chunk_scan``; sizes as there."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMIT,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        state = last.take(4)
        if state is None:
            shape = (hidden_states.shape[0], *hidden_states.shape[2:], B.shape[-1])
            state = hidden_states.new_zeros(shape, dtype=torch.float)
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = nn.functional.softplus(dt) if dt_softplus else dt
        if tuple(dt_limit) != _NO_LIMIT:
            if last.before is None:
                last.refused = f"transformers applies its time_step_limit, {tuple(dt_limit)}, to prompts only"
            else:
                dt = LIMITED_STEPS(dt, *dt_limit, last.before)
        out, state = CHUNKED_SCAN(hidden_states, dt, A, B, C, state, chunk_size)
        out = out if D is None else out + D[..., None] * hidden_states.float()
        return (out, state) if return_final_states else out

    return scan
