"""Finds the cuts of a model between devices with which the most tokens fit, and how many these are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from splitkit._gc import paused_collector
from splitkit._torch import pytree
from splitkit.costs import Device
from splitkit.errors import CaptureError
from splitkit.frontends.generate_calls import continued_states
from splitkit.memory.kernels.target_kernels import attention
from splitkit.memory.storage_watch import StorageWatch
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.studies.fit.fit_model import FitModel, ModelBlock, Weight
from splitkit.studies.fit.layout import BlockFit, Holding
from splitkit.testing.config_models import main_input


@dataclass(frozen=True, eq=False)
class InferenceFit(BlockFit):
    """Answers for one model and one number of requests; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        blocks: its blocks.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes.
        bits: bits a value of the weights; ``None``: as the model has them.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]
    requests: int = 1
    chunk: int = 512
    bits: int | None = None
    _steps: dict[int, StepBytes] = field(default_factory=dict, repr=False)

    def step(self, tokens: int) -> StepBytes:
        """Return what the blocks hold with so many tokens of each request, in the order in which they run."""
        if tokens not in self._steps:
            self._steps[tokens] = inference_step(self.subject, self.blocks, tokens, self.requests, self.chunk)
        return self._steps[tokens]

    @property
    def line(self) -> list[ModelBlock]:
        """The blocks in the order in which they run; some step must have been run."""
        return [self.blocks[number] for number in next(iter(self._steps.values())).order]

    def holds(self, step: StepBytes, start: int, end: int) -> ByteBreakdown:
        """Return what a device holds with a range of blocks, in one step."""
        numbers = step.order[start:end]
        return ByteBreakdown(
            weights=weight_bytes([self.blocks[n] for n in numbers], self.bits),
            cache=sum(step.cache[n] for n in numbers),
            activations=max((step.work[n] for n in numbers), default=0),
        )

    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each request."""
        step = self.step(tokens)
        return lambda device, i, j: self.holds(step, i, j)


def weight_bytes(blocks: Sequence[ModelBlock], bits: int | None = None) -> int:
    """Return the bytes of the weights of some blocks, tied ones once; with so many bits a value where that is less."""
    found: Mapping[int, Weight] = {key: weight for block in blocks for key, weight in block.weights.items()}
    return sum(weight.nbytes if bits is None else weight.narrow.get(bits, weight.nbytes) for weight in found.values())


# Runs a generation step of a model on ``meta``: the bytes of each block's cache and activations.


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


# Runs a model on ``meta`` and records, for each block, the most bytes alive while it runs beside what is held.


class LikeOnGpu(TorchFunctionMode):
    """Lets a run on ``meta`` take what it takes on a GPU, with plain inputs.

    Attention runs the kernel of a GPU. Products of groups (of experts) are computed in any floating dtype. Questions
    that only values could answer, such as whether a mask is full, a value is infinite or a layer is left out, have the
    usual answer: what is asked of all values holds (also when they are counted), and what is asked of any, or of one,
    does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, tuple[Tensor, bool]] = {}
        self._counts: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return attention(Device.kernels, func, *args, **kwargs)
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _GroupedProduct.apply(*args[:2])  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        result = func(*args, **kwargs)
        if func in _QUESTIONS and isinstance(result, Tensor) and result.ndim == 0:
            counted = func is Tensor.__eq__ and args[1] == self._counts.get(id(args[0]), (None, None))[1]
            self._answers[id(result)] = result, counted or _QUESTIONS[func]
        if func is Tensor.sum and isinstance(result, Tensor) and result.ndim == 0:
            self._counts[id(result)] = result, args[0].numel()
        return result


_QUESTIONS: dict[Any, bool] = {Tensor.all: True, torch.all: True} | dict.fromkeys(
    (Tensor.any, torch.any, Tensor.__eq__, Tensor.lt, Tensor.gt, Tensor.le, Tensor.ge), False
)


class _GroupedProduct(torch.autograd.Function):
    """Makes and saves what a product of groups of rows with a matrix each does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return the result, a row for each row."""
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of rows and matrices."""
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


class BlockWatch:
    """A run on ``meta`` whose ops belong to blocks.

    Attributes:
        marks: index of the first op -> number of the block that runs from there on, in the order of time.
        order: the blocks that were called, by their first call.
    """

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        self.blocks = blocks
        self.marks: list[tuple[int, int]] = []
        self.order: list[int] = []
        self._watch = StorageWatch()

    @property
    def current(self) -> int:
        """The block that runs; before the first one starts, that one."""
        return self.marks[-1][1] if self.marks else 0

    def enter(self, number: int) -> None:
        """Let the next ops belong to a block."""
        self.marks.append((len(self._watch.ops), number))
        if number not in self.order:
            self.order.append(number)

    def hold(self, name: str, tensors: Any) -> None:
        """Count memory that is alive before the run under a name; the tensors themselves are not kept."""
        for tensor in pytree.tree_leaves(tensors):
            self._watch.see(tensor, name)

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a function under the watch, and return its result."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.callback(block.module.register_forward_pre_hook(self._entered(number)).remove)
            stack.enter_context(paused_collector())
            stack.enter_context(self._watch.watching())
            return work()

    def _entered(self, number: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: self.enter(number)

    def alive(self, *without: str) -> list[int]:
        """Return the bytes alive after each op, without what was held under these names."""
        steps = len(self._watch.ops)
        change = [0] * (steps + 1)
        for life in self._watch.lives:
            if life.made not in without:
                change[min(max(life.born, 0), steps)] += life.nbytes
                change[min(life.died, steps)] -= life.nbytes
        return list(accumulate(change))[:steps]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (block, first op, end) of each stretch of ops; what runs before the first block belongs to it."""
        starts = [0, *(start for start, _ in self.marks[1:])] if self.marks else [0]
        ends = [*starts[1:], len(self._watch.ops)]
        numbers = [number for _, number in self.marks] or [0]
        yield from zip(numbers, starts, ends, strict=True)


@contextmanager
def on_meta() -> Iterator[None]:
    """Make new tensors on ``meta``, and run as on a GPU with plain inputs."""
    with torch.device("meta"), LikeOnGpu():
        yield
