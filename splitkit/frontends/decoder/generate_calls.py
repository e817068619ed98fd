"""See what transformers' ``generate`` gives a model's ``forward``, or its language model, without running the model.

Models differ in this: positions in several rows, a mask for each kind of layer, embeddings for each layer. So a step is
captured with what the model's own ``generate`` gives, and a model is refused if that differs between its steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitkit._torch import FakeTensorMode, pytree
from splitkit.errors import listed
from splitkit.frontends.capture.capture import silenced
from splitkit.frontends.capture.capture_errors import construct_of
from splitkit.frontends.capture.first_call import attributes_restored
from splitkit.frontends.decoder.example_caches import model_device, not_a_decoder
from splitkit.frontends.trace_settings import as_in_export
from splitkit.graph.caches import ARGUMENTS, DEEPSTACK
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
            if not _are_tensors(several.get(name)):
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
        more = [
            name for name in names if name not in (*step, *_OF_ANY_MODEL, *ARGUMENTS, "position_ids", "attention_mask")
        ]
        if more:
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
        with FakeTensorMode(allow_non_fake_inputs=True), as_in_export():
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
    return {name: x for name, x in given.items() if name not in left_out and not _is_nothing(x)}


def _is_nothing(value: Any) -> bool:
    return all(leaf is None or leaf is False for leaf in pytree.tree_leaves(value))


def _are_tensors(value: Any) -> bool:
    return all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _kind(value: Any) -> str:
    """Say what one graph may not be given different ones of: the number of dimensions and the dtype of each tensor."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    return ", ".join(f"{pytree.keystr(path)} {_kind_of_leaf(leaf)}".strip() for path, leaf in leaves)


def _kind_of_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of {leaf.ndim} dimensions"
    return "nothing" if leaf is None else f"a {type(leaf).__name__}"
