"""Generates on several devices of one process, with the ``generate`` of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from splitkit.engine.split import Split
from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import ARGUMENTS, DEEPSTACK
from splitkit.graph.storages import attribute, parameters_and_buffers
from splitkit.language_model import given_to_language_model
from splitkit.plans.parts import PartKey
from splitkit.runtime.devices.accelerators import (
    Receive,
    Send,
    move_tensors,
    replace_tensors,
    same_device,
    tables_of,
)
from splitkit.runtime.devices.device_map import Devices, captured_types
from splitkit.runtime.devices.on_devices import Move, OnDevices, PartOnDevice
from splitkit.runtime.generation.before_stages import require_data
from splitkit.runtime.generation.decoder import ENCODED, MASK, DecoderInputs
from splitkit.runtime.generation.encoder_caches import EncoderCaches, KeptCache, encoder_caches_of, kept_caches
from splitkit.runtime.generation.generation_request import unfit


def generator(model: Any, split: Split, devices: Devices = None) -> Any:
    """Return a model like the given one whose steps run on the parts of a split, each on its device.

    ::

        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
        generator = sk.generator(model, split, ["cuda:0", "cuda:1"])
        tokens = generator.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=20)

    ``generate`` is transformers' own, with greedy search, sampling, beam search, logits processors, stopping criteria,
    streamers and ``prefill_chunk_size``. Prompts of a decoder alone may be on any device, and are padded on the left;
    what an encoder or images need is on ``generator.device``. The keys and values
    of a layer stay on the device of its part. They are never copied to another one: they grow in a ``DynamicCache``
    whose layers are on several devices, which you may keep and pass on as ``past_key_values``.

    The encoder of a model such as T5 runs whole on the device of the first part.

    Parameters and buffers are moved, as by `splitkit.runtime.to_devices`; the given model shares them, so that only the
    result can be called afterwards.

    Args:
        model: the model that was captured, for its configuration and its ``generate``; its weights may be on ``meta``
            if the split has some.
        split: of the graph of `splitkit.capture_decoder`.
        devices: part -> device, or devices in the order of the parts, or one for all; by default the devices in the
            plan.

    Raises:
        PipelineError: SK801 for a split that is not of a decoder, or of which a cache would cross a border; SK807 and
            SK808 as `splitkit.runtime.to_devices`. A call raises SK802 for arguments that the graph does not take: the
            message names them.
    """
    kind = type(model)
    if not hasattr(model, "generate") or not hasattr(model, "prepare_inputs_for_generation"):
        raise PipelineError("SK801", f"{kind.__name__} has no generate", "Give a model of transformers that generates.")
    before = parameters_and_buffers(split.flow.root)
    # what load has read
    _share(model, {}, before)
    remedy = "Load the weights first: splitkit.load(split, folder, devices)."
    require_data(_run_whole(model, split), "an encoder, or what images need, runs whole and is in no part", remedy)
    rest, signature = _unread(model, split), inspect.signature(kind.forward)
    step = ModelStep(model, split, devices)
    _share(model, before, parameters_and_buffers(step.decoder.tensors))
    first = next(iter(step.decoder.devices.values()))
    move_tensors(model, nn.Module(), dict.fromkeys(rest, first))
    _require_there(_run_whole(model, split), first)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        more = given.pop("kwargs", {})
        return step({**given, **more})

    own = {"forward": forward, "device": property(lambda self: first), "__module__": kind.__module__}
    made: Any = type(f"Split{kind.__name__}", (kind,), own)
    new = made.__new__(made)
    new.__dict__.update(vars(model))
    new.generation_config = copy.deepcopy(model.generation_config)
    return new


def _unread(model: nn.Module, split: Split) -> list[int]:
    """Return the ids of parameters and buffers that no part reads, such as those of an encoder."""
    root = split.flow.root
    nodes = [node for node in split.flow.graph.find_nodes(op="get_attr") if node.users]
    read = {id(attribute(root, str(node.target))) for node in nodes}
    return [id(t) for t in (*model.parameters(), *model.buffers()) if id(t) not in read and not t.is_meta]


def _share(model: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Let a model hold the tensors of the parts: its own may be on ``meta``, or of a kind that cannot move in place."""
    new = {id(tensor): after[name] for name, tensor in before.items()}
    named = parameters_and_buffers(model)
    new |= {id(tensor): after[name] for name, tensor in named.items() if name in after and tensor.is_meta}
    replace_tensors(tables_of(model), new)


def _run_whole(model: Any, split: Split) -> dict[str, torch.Tensor]:
    """Return name -> parameter or buffer of what runs on the first device, and may share a weight with a part."""
    inputs = DecoderInputs.among([node.name for node in split.flow.graph.find_nodes(op="placeholder")])
    return {} if inputs is None else inputs.whole_tensors(model)


def _require_there(held: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Refuse tensors that a part on another device has.

    Raises:
        PipelineError: SK808.
    """
    for name, tensor in held.items():
        if not tensor.is_meta and not same_device(tensor.device, device):
            raise PipelineError(
                "SK808",
                f"{name} is read on {device} by what runs whole, and by a part on {tensor.device}",
                "Untie the weight, or let the first part read it.",
                [name],
            )


# Runs a call of a model's ``forward`` as a step of a split decoder.


_PASSED_ON = ("past_key_values", "use_cache", "logits_to_keep")
_READ_HERE = {"self", *ARGUMENTS, "return_dict", "use_cache", "logits_to_keep", "cache_position"}


class ModelStep:
    """A step that takes the arguments of a model's ``forward``, and returns its outputs.

    Attributes:
        decoder: the parts on their devices.
    """

    def __init__(self, model: Any, split: Split, devices: Devices = None) -> None:
        self.decoder = DecoderOnDevices(split, devices)
        self._encoder = _encoder_caches(split, self.decoder)
        names = DecoderInputs.among(self.decoder.inputs)
        if names is None:
            raise PipelineError(
                "SK801",
                "the graph reads neither tokens nor embeddings: its inputs are " + listed(self.decoder.inputs, 6),
                "Capture one step of the decoder: sk.capture_decoder(model).",
            )
        self._model, self._embedded = model, names.embedded
        self._tokens, self._mask, self._positions = names.tokens, names.mask, names.positions
        caches = self.decoder.caches
        self._cache = next(name for name in ARGUMENTS if caches[0].given.startswith(name))
        self._grows = any(cache.grows for cache in caches)
        given = {cache.given for cache in caches}
        tensors = {node.name: node.meta.get("val") for node in split.flow.graph.find_nodes(op="placeholder")}
        self._wanted = {n: x for n, x in tensors.items() if isinstance(x, torch.Tensor) and n not in given}
        self._without_images = {
            name: functools.partial(_no_features, x) for name, x in self._wanted.items() if name.startswith(DEEPSTACK)
        }
        self._masks = [name for name, x in self._wanted.items() if name.startswith(self._mask) and x.ndim == 4]
        # what is made here if it is not given, unless the graph reads it in another form than [sequences, positions]
        forms = {name: [w for w in self._wanted if w.startswith(name)] for name in (self._mask, self._positions)}
        self._made = {
            name for name, read in forms.items() if not read or (name in read and self._wanted[name].ndim == 2)
        }
        self._taken = {self._tokens, *self._made, *self.decoder.inputs}
        self._taken |= {"encoder_outputs", MASK} if self._encoder else set()

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """Run one call, with the arguments by name.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take.
        """
        given = self._to_language_model(given) if self._embedded else given
        self._require_known(given)
        ids: torch.Tensor = given[self._tokens]
        cache = given.get(self._cache)
        cache = self._empty_cache() if cache is None else cache
        require_plain(cache)
        past, mask = cached_positions(cache), given.get(self._mask)
        if not self._grows and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # states do not say how many positions came before, and the graph reads those of the step
            mask = mask[:, -ids.shape[1] :]
        inputs = {name: x for name, x in _leaves(given) if name in self._wanted and x is not None}
        if self._mask in self._made:
            inputs[self._mask] = mask = _mask(self._mask, mask, ids, past)
            if self._positions in self._made:
                inputs.setdefault(self._positions, (mask.cumsum(1) - 1).clamp(min=0)[:, past:])
        if (positions := inputs.get(self._positions)) is not None and positions.ndim == 2:
            inputs[self._positions] = positions.expand(len(ids), -1)
        hidden = given["encoder_outputs"][0] if self._encoder else None
        if hidden is not None:
            own = f"encoder_outputs_{MASK}"
            name, seen = (own, given["encoder_outputs"].get(MASK)) if own in self._wanted else (MASK, given.get(MASK))
            inputs[ENCODED] = hidden
            inputs[name] = _ones(ids, *hidden.shape[:2]) if seen is None else seen
        inputs |= {name: empty(ids) for name, empty in self._without_images.items() if name not in inputs}
        inputs |= {name: self._no_mask(name, ids, past) for name in self._masks if name not in inputs}
        self._require_all(inputs)
        tensors = taken_from(cache, self.decoder, len(ids), lambda: self._encoded(inputs))
        logits, tensors = self.decoder.step(inputs, tensors)
        put_into(cache, self.decoder.caches, tensors)
        return _output(logits, self._cache, cache if given.get("use_cache") is not False else None, hidden)

    def _encoded(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return name -> constant cache, for the output of an encoder among the inputs of a step."""
        return {name: cache for each in self._encoder for name, cache in each.compute(inputs).items()}

    def _to_language_model(self, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in given.items() if name != "self"}
        passed_on = {name: given[name] for name in _PASSED_ON if name in given}
        return {**given_to_language_model(self._model, own), **passed_on}

    def _no_mask(self, name: str, ids: torch.Tensor, past: int) -> torch.Tensor:
        """Return the mask that is the same as none: a model leaves it out where its attention can do without."""
        allowed = torch.ones(len(ids), 1, ids.shape[1], past + ids.shape[1], dtype=torch.bool, device=ids.device)
        if all(getattr(module, "is_causal", True) for module in self._model.get_decoder().modules()):
            allowed = allowed.tril(past)
        dtype = self._wanted[name].dtype
        return allowed if dtype == torch.bool else torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if self._encoder else DynamicCache()

    def _require_all(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a call without an input that the graph reads, or with one of other dimensions."""
        for name, like in self._wanted.items():
            found = inputs.get(name)
            if not isinstance(found, torch.Tensor) or found.ndim != like.ndim:
                has = f"is {list(found.shape)}" if isinstance(found, torch.Tensor) else "is missing"
                reason = f"{name} {has}, and the graph reads {like.ndim} dimensions"
                raise unfit(reason, "Give what generate gives the model.")

    def _require_known(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that the graph has no input for, and what it does not compute."""
        ids = given.get(self._tokens)
        if not isinstance(ids, torch.Tensor) or ids.ndim != (3 if self._embedded else 2) or not ids.numel():
            raise unfit(f"there are no {self._tokens}", "Give what the graph was captured with.")
        if self._encoder and given.get("encoder_outputs") is None:
            raise unfit("there are no encoder_outputs", "Give those of model.get_encoder(), as generate does.")
        for name, value in _leaves({name: x for name, x in given.items() if name not in _READ_HERE}):
            if name not in self._taken and value is not None and value is not False:
                raise unfit(f"the graph has no input {name}", f"Call it without {name}; it was captured without.")
        if given.get("return_dict") is False:
            raise unfit("return_dict is False", "Read logits and past_key_values by name.")
        keep = given.get("logits_to_keep", 0)
        if "logits_to_keep" in self.decoder.inputs and ids.shape[1] > 1 and keep != 1:
            wanted = "all" if isinstance(keep, int) and not keep else str(keep)
            raise unfit(
                f"the graph computes the logits of the last token, not {wanted}",
                "Call it with logits_to_keep=1, as generate does; assisted decoding needs more than it has.",
            )


def _leaves(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name -> value for the inputs of a graph, with the names that export gives in dicts and lists."""
    for name, value in given.items():
        if type(value) is dict:
            yield from _leaves({f"{name}_{key}": x for key, x in value.items()})
        elif isinstance(value, (list, tuple)):
            yield from _leaves({f"{name}_{i}": x for i, x in enumerate(value)})
        else:
            yield name, value


def _encoder_caches(split: Split, decoder: DecoderOnDevices) -> list[EncoderCaches]:
    """Return what computes the constant caches of each part that has some."""
    root, names = split.flow.root, dict[PartKey, list[str]]()
    for cache in decoder.caches:
        if cache.constant:
            names.setdefault(cache.part, []).append(cache.given)
    captured, homes, found = captured_types(split.flow.graph, root), dict[int, torch.device](), list[EncoderCaches]()
    for part, own in names.items():
        gm, device = encoder_caches_of(root, own), decoder.devices[part]
        if {homes.setdefault(id(t), device) for t in parameters_and_buffers(gm).values()} - {device}:
            gm = copy.deepcopy(gm)  # of a tied weight, each device has a copy
        found.append(EncoderCaches(gm, own, captured, device))
    return found


def _output(logits: torch.Tensor, name: str, cache: Any, hidden: torch.Tensor | None) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
    from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

    if hidden is not None:
        return Seq2SeqLMOutput(logits=logits, past_key_values=cache, encoder_last_hidden_state=hidden)
    kind: Any = CausalLMOutputWithPast if name == ARGUMENTS[0] else MambaCausalLMOutput
    return kind(logits=logits, **{name: cache})


def _mask(name: str, mask: torch.Tensor | None, ids: torch.Tensor, past: int) -> torch.Tensor:
    sequences, query = ids.shape[:2]
    if mask is None:
        return _ones(ids, sequences, past + query)
    if not isinstance(mask, torch.Tensor) or mask.shape != (sequences, past + query):
        found = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise unfit(
            f"{name} is {found}, for {sequences} sequences of {past} cached and {query} new tokens",
            f"Give one of {[sequences, past + query]}.",
        )
    return mask


def _no_features(like: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Return what stands for no images: no token is one, and there are no features."""
    sizes = embedded.shape[:2] if like.dtype == torch.bool else (0, embedded.shape[2])
    return torch.zeros(sizes, dtype=like.dtype, device=embedded.device)


def _ones(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.long, device=like.device)


# Takes the tensors of a step from a cache of transformers, and puts them back.


_OWN = re.compile(
    r"(?:(self|cross)_attention_cache_)?layers_(\d+)_(keys|values|conv_states|recurrent_states)_?(\d*)_?$"
)
_KEYS = ("keys", "values")
_TRANSFORMERS = re.compile(r"(key|value)_cache_(\d+)$")


class _Place(NamedTuple):
    """Where a tensor is in a cache.

    Attributes:
        within: ``"self"`` or ``"cross"``, the cache of an ``EncoderDecoderCache``; empty for any other cache.
        layer: the number of the layer.
        kind: ``"keys"``, ``"values"``, ``"conv_states"`` or ``"recurrent_states"``.
        state: the number of a state of the layer.
    """

    within: str
    layer: int
    kind: str
    state: int = 0

    def tensor_in(self, layer: Any) -> Any:
        """Return the tensor in a layer of a cache; ``None`` if it is empty."""
        found = getattr(layer, self.kind, None)
        return found.get(self.state) if isinstance(found, dict) else found

    def put_into(self, layer: Any, tensor: torch.Tensor) -> None:
        """Let a layer of a cache hold a tensor."""
        layer.dtype, layer.device = tensor.dtype, tensor.device
        if self.kind in _KEYS:
            setattr(layer, self.kind, tensor)
            layer.is_initialized = True
            return
        getattr(layer, self.kind)[self.state] = tensor
        getattr(layer, f"is_{self.kind}_initialized")[self.state] = layer.has_previous_state[self.state] = True
        if self.kind == "conv_states":
            layer.conv_kernel_size[self.state] = tensor.shape[-1]


def require_plain(cache: Any) -> None:
    """Refuse a cache that is no ``DynamicCache``, or that moves layers to the CPU.

    Raises:
        PipelineError: SK802.
    """
    for inner in _caches_in(cache).values():
        offloads = " that offloads" if getattr(inner, "offloading", False) else ""
        if type(inner).__name__ != "DynamicCache" or offloads:
            raise unfit(
                f"the cache is a {type(inner).__name__}{offloads}, which the graph cannot keep on its devices",
                "Generate without cache_implementation, or give a DynamicCache.",
            )


def cached_positions(cache: Any) -> int:
    """Return the positions that a cache holds; 0 if it has states only, which do not say."""
    inside = _caches_in(cache).values()
    if not any(hasattr(layer, "get_seq_length") for inner in inside for layer in inner.layers):
        return 0
    return int(cache.get_seq_length())


def taken_from(
    cache: Any, decoder: DecoderOnDevices, sequences: int, encoded: Callable[[], Mapping[str, torch.Tensor]]
) -> list[torch.Tensor]:
    """Take the tensors out of a cache, in the order of a step.

    Args:
        cache: from an earlier step, or without tensors.
        decoder: the decoder.
        sequences: the number of sequences.
        encoded: computes the constant tensors by name, if the cache does not have them.

    Raises:
        PipelineError: SK802 for a cache of another kind, or for other sequences; nothing is taken out then.
    """
    inside, places = _caches_in(cache), [_place(kept) for kept in decoder.caches]
    filled = {within: _is_filled(inner) for within, inner in inside.items()}
    for within, inner in inside.items():
        if filled[within]:
            _require_layers(inner, [place for place in places if place.within == within], sequences)
    missing = any(kept.constant and not filled[p.within] for kept, p in zip(decoder.caches, places, strict=True))
    constants = encoded() if missing else {}
    found = []
    for kept, place in zip(decoder.caches, places, strict=True):
        if filled[place.within]:
            tensor = place.tensor_in(inside[place.within].layers[place.layer]).to(decoder.devices[kept.part])
        elif kept.constant:
            tensor = constants[kept.given]
        else:
            tensor = torch.zeros(kept.sizes(sequences, 0), dtype=kept.like.dtype, device=decoder.devices[kept.part])
        found.append(tensor)
    for inner in inside.values():
        for layer in inner.layers:
            _forget(layer)
    return found


def put_into(cache: Any, caches: Sequence[KeptCache], tensors: Sequence[torch.Tensor]) -> None:
    """Let a cache hold the tensors of a step, each on its device; every layer with keys keeps all positions."""
    inside, places = _caches_in(cache), [_place(kept) for kept in caches]
    for within, inner in inside.items():
        inner.layers = [_class_of(kinds)() for kinds in _kinds([place for place in places if place.within == within])]
    for place, tensor in zip(places, tensors, strict=True):
        place.put_into(inside[place.within].layers[place.layer], tensor)
    if "cross" in inside:
        cache.is_updated = dict.fromkeys(range(len(inside["cross"].layers)), True)


def _kinds(places: Sequence[_Place]) -> list[set[str]]:
    """Return the kinds of tensors of each layer; none for a layer that keeps nothing, such as one of experts only."""
    found: list[set[str]] = [set() for _ in range(1 + max((place.layer for place in places), default=-1))]
    for place in places:
        found[place.layer].add(place.kind)
    return found


def _class_of(kinds: set[str]) -> Any:
    """Return the class of transformers for a layer with these kinds of tensors."""
    from transformers import cache_utils

    has_keys, has_states = not kinds.isdisjoint(_KEYS), not kinds.issubset(_KEYS)
    if has_states:
        return cache_utils.LinearAttentionAndFullAttentionLayer if has_keys else cache_utils.LinearAttentionLayer
    return cache_utils.DynamicLayer if has_keys else cache_utils.DummyLayer


def _forget(layer: Any) -> None:
    """Let a layer hold no tensors, so that those of the last step can be freed."""
    for kind in _KEYS:
        if getattr(layer, kind, None) is not None:
            setattr(layer, kind, None)
    for table in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        table.update(dict.fromkeys(table))


def _caches_in(cache: Any) -> Mapping[str, Any]:
    if type(cache).__name__ == "EncoderDecoderCache":
        return {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    return {"": cache}


def _is_filled(cache: Any) -> bool:
    for layer in cache.layers:
        keys, states = getattr(layer, "keys", None), getattr(layer, "has_previous_state", {})
        if (isinstance(keys, torch.Tensor) and keys.numel()) or any(states.values()):
            return True
    return False


def _require_layers(cache: Any, places: Sequence[_Place], sequences: int) -> None:
    layers, wanted = cache.layers, [_class_of(kinds) for kinds in _kinds(places)]
    # behind the last layer that keeps something there may be some that keep nothing
    wanted += [_class_of(set())] * (len(layers) - len(wanted))
    if [type(layer) for layer in layers] != wanted:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise unfit(f"the cache has {len(layers)} layers of {kinds}", "Give the cache that an earlier call returned.")
    count = next(tensor.shape[0] for place in places if (tensor := place.tensor_in(layers[place.layer])) is not None)
    if count != sequences:
        raise unfit(f"there are {sequences} sequences, and the cache has {count}", "Give as many.")


def _place(kept: KeptCache) -> _Place:
    if found := _OWN.search(kept.given):
        return _Place(found[1] or "", int(found[2]), found[3], int(found[4] or 0))
    # where transformers' own registration of the class came first
    if found := _TRANSFORMERS.search(kept.given):
        return _Place("", int(found[2]), f"{found[1]}s")
    raise unfit(f"the cache {kept.given} is not keys, values or a state of a layer", "Capture with sk.capture_decoder.")


# Runs the steps of a split decoder in one process, with each part and its caches on a device.
#
# A cache is handed to its part in a box, from which the part takes it at the first use. So nobody else holds the old
# tensor while the part makes the new one, and it is freed at once::
#
#     parent:  part(hidden, box)        part:  keys = take(box); cat = cat([keys, new]); keys = None


Box = list[torch.Tensor]
"""One tensor of a cache, until its part has taken it."""


def take(box: Box) -> torch.Tensor:
    """Take the tensor out of a box."""
    return box.pop()


class DecoderOnDevices:
    """A step of a decoder, part after part.

    Attributes:
        caches: the tensors of the caches, in the order in which a step takes and returns them.
        inputs: the names of all inputs of the graph, in their order.
        devices: part -> its device.
        tensors: the module that holds the parameters.
        moves: the copies of each step; no cache is among them.
    """

    def __init__(self, split: Split, devices: Devices = None) -> None:
        self.caches: Sequence[KeptCache] = kept_caches(split)
        self.tensors = OnDevices(split, devices)
        self.devices: Mapping[PartKey, torch.device] = self.tensors.part_devices
        self._parent = self.tensors.parent
        given, weights = (self._parent.graph.find_nodes(op=op) for op in ("placeholder", "get_attr"))
        known, constants = {cache.given for cache in self.caches}, {c.given for c in self.caches if c.constant}
        self.inputs = tuple(node.name for node in given)
        for node in given:
            if node.name in known:
                readers = _readers(self._parent, node)
                for reader in readers if node.name not in constants else ():
                    part = self._parent.get_submodule(str(reader.target))
                    assert isinstance(part, PartOnDevice)
                    _take_at_first_use(cast(fx.GraphModule, part.part), reader.args.index(node))
        for node in weights:
            _copy_once(self._parent, node)
        still = {node.name for node in split.flow.graph.find_nodes(op="get_attr")} | known
        self.moves: Sequence[Move] = tuple(move for move in self.tensors.moves if move.name not in still)
        # plain arguments and results, not the model's
        self._parent.graph.set_codegen(fx.graph.CodeGen())
        self._parent.recompile()

    @torch.no_grad()
    def step(self, inputs: Mapping[str, Any], caches: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits and the updated caches.

        Args:
            inputs: name of an input -> its value; inputs that are not named are ``None``.
            caches: the caches, on the devices of their parts; the list is emptied, so that old caches can be freed.
        """
        given = dict[str, Any](inputs)
        for cache in self.caches:
            tensor = caches.pop(0)
            given[cache.given] = tensor if cache.constant else [tensor]
            del tensor
        outputs = self._parent.forward(*map(given.get, self.inputs))
        return outputs[0], list(outputs[1 : len(self.caches) + 1])


def _copy_once(parent: fx.GraphModule, weight: fx.Node) -> None:
    """Hold copies of a tied weight on the other devices that read it: here it does not change between the steps."""
    value = attribute(parent, str(weight.target))
    for sent in list(weight.users):
        move = parent.get_submodule(str(sent.target))
        if not isinstance(move, Send) or not isinstance(value, torch.Tensor):
            continue
        name = f"{sent.target}_{sent.name}"
        parent.register_buffer(name, value.detach().to(move.target), persistent=False)
        with parent.graph.inserting_before(sent):
            held = parent.graph.get_attr(name)
        _bypass(parent, sent, held)


def _readers(parent: fx.GraphModule, given: fx.Node) -> list[fx.Node]:
    """Return the calls of parts that read an input, after removing the copies to their devices."""
    for sent in list(given.users):
        if sent.op == "call_module" and isinstance(parent.get_submodule(str(sent.target)), Send):
            _bypass(parent, sent, given)
    return [user for user in given.users if user.op == "call_module"]


def _bypass(parent: fx.GraphModule, sent: fx.Node, value: fx.Node) -> None:
    """Remove a copy between devices; its receivers read ``value`` instead."""
    for user in list(sent.users):
        if isinstance(parent.get_submodule(str(user.target)), Receive):
            user.replace_all_uses_with(value)
            parent.graph.erase_node(user)
        else:
            # the end of the call, where the caller's streams wait for copies
            user.args = tuple(arg for arg in user.args if arg is not sent)
    parent.graph.erase_node(sent)


def _take_at_first_use(part: fx.GraphModule, place: int) -> None:
    given = part.graph.find_nodes(op="placeholder")[place]
    users = set(given.users)
    with part.graph.inserting_before(next(node for node in part.graph.nodes if node in users)):
        taken = part.graph.call_function(take, (given,))
    taken.meta = dict(given.meta)
    given.replace_all_uses_with(taken, delete_user_cb=lambda user: user is not taken)
    part.recompile()
