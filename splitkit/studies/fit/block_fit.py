"""Cuts the blocks of a model into one run for each device, so that each run fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from splitkit._gc import paused_collector
from splitkit.errors import CaptureError
from splitkit.frontends.generate_calls import continued_states
from splitkit.graph.losses import loss_of, no_loss
from splitkit.graph.storages import tensors
from splitkit.hardware.device_specs import Device
from splitkit.memory.kernels.target_kernels import attention
from splitkit.memory.storage_watch import StorageWatch
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.solvers.most_fitting import most_fitting
from splitkit.studies.fit.fit_model import Card, FitModel, ModelBlock, Weight, memory_key
from splitkit.testing.config_models import loss_inputs, main_input

Range = tuple[int, int]
"""The first block of a device and the one after its last, by their positions in the order in which blocks run."""

_STEPS = 40
"""Halvings in the search for the most even layout: enough for any two sizes to differ."""


Holding = Callable[[int, int, int], ByteBreakdown]
"""(device, first block, block after the last) -> what the device holds; more blocks never hold less."""


def fitting_layout(count: int, limits: Sequence[float], holds: Holding) -> list[Range] | None:
    """Return consecutive runs of ``count`` blocks within the limits of the devices, ``None`` if there are none.

    Each device takes as many blocks as it can. As more blocks never hold less, no other layout gets further.
    """
    found, start = [], 0
    for device, limit in enumerate(limits):
        end = start + bisect_left(range(start + 1, count + 1), True, key=partial(_exceeds, holds, device, start, limit))
        found.append((start, end))
        start = end
    return found if start == count else None


def _exceeds(holds: Holding, device: int, start: int, limit: float, end: int) -> bool:
    return holds(device, start, end).total > limit


def most_even_layout(count: int, limits: Sequence[int], holds: Holding) -> list[Range]:
    """Return a layout whose fullest device, relative to its limit, is the least full; it may exceed the limits."""

    def within(share: float) -> list[Range] | None:
        return fitting_layout(count, [share * limit for limit in limits], holds)

    high = holds(0, 0, count).total / limits[0]
    best, low = [(0, count), *[(count, count)] * (len(limits) - 1)], 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if (found := within(middle)) is None:
            low = middle
        else:
            best, high = found, middle
    return best


class BlockFit(ABC):
    """Cuts a model between its blocks, one run of blocks for each device, and finds the most tokens that fit.

    Attributes:
        subject: the model.
    """

    subject: FitModel
    _steps: Mapping[int, Any]

    @property
    def line(self) -> list[ModelBlock]:
        """The blocks in the order in which they run; some step must have been run."""
        return [self.subject.blocks[number] for number in next(iter(self._steps.values())).order]

    @abstractmethod
    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each sequence."""

    def layout(self, cards: Sequence[Card], tokens: int) -> list[Range] | None:
        """Return cuts with which so many tokens of each sequence fit, ``None`` if there are none."""
        limits = [card.limit for card in cards]
        return fitting_layout(len(self.subject.blocks), limits, self.holding(len(cards), tokens))

    def even_layout(self, cards: Sequence[Card], tokens: int) -> list[Range]:
        """Return the cuts whose fullest device is the least full."""
        limits = [card.limit for card in cards]
        return most_even_layout(len(self.subject.blocks), limits, self.holding(len(cards), tokens))

    def rows(self, cards: Sequence[Card], tokens: int) -> list[ByteBreakdown]:
        """Return what each device holds with the most even layout."""
        holds = self.holding(len(cards), tokens)
        return [holds(device, i, j) for device, (i, j) in enumerate(self.even_layout(cards, tokens))]

    def most_tokens(self, cards: Sequence[Card]) -> int:
        """Return the most tokens of each sequence that fit with any cuts between blocks, 0 if not even one does."""

        def share(tokens: int) -> float:
            return max(held.total / card.limit for held, card in zip(self.rows(cards, tokens), cards, strict=True))

        def between(low: int, high: int) -> int:
            first, last = share(low), share(high)
            return low + int((high - low) * (1 - first) / (last - first))

        return most_fitting(lambda tokens: self.layout(cards, tokens) is not None, between, self.subject.longest)


# Finds the cuts of a model between devices with which the most tokens fit, and how many these are.


@dataclass(frozen=True, eq=False)
class InferenceFit(BlockFit):
    """Answers for one model and one number of requests; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes.
    """

    subject: FitModel
    requests: int = 1
    chunk: int = 512
    _steps: dict[int, StepBytes] = field(default_factory=dict, repr=False)

    def step(self, tokens: int) -> StepBytes:
        """Return what the blocks hold with so many tokens of each request, in the order in which they run."""
        if tokens not in self._steps:
            self._steps[tokens] = inference_step(self.subject, tokens, self.requests, self.chunk)
        return self._steps[tokens]

    def holds(self, step: StepBytes, start: int, end: int) -> ByteBreakdown:
        """Return what a device holds with a range of blocks, in one step."""
        numbers = step.order[start:end]
        return ByteBreakdown(
            weights=weight_bytes([self.subject.blocks[n] for n in numbers], self.subject.bits),
            cache=sum(step.cache[n] for n in numbers),
            activations=max((step.work[n] for n in numbers), default=0),
        )

    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each request."""
        step = self.step(tokens)
        return lambda device, i, j: self.holds(step, i, j)


def weight_bytes(blocks: Sequence[ModelBlock], bits: int | None = None) -> int:
    """Return the bytes of the weights of some blocks, tied ones once; with so many bits a value where that is less."""
    weights = _weights_of(blocks)
    return sum(weight.nbytes if bits is None else weight.narrow.get(bits, weight.nbytes) for weight in weights)


def _weights_of(blocks: Sequence[ModelBlock]) -> Iterable[Weight]:
    """Return what the memories of the weights of some blocks hold, tied ones once."""
    found: Mapping[int, Weight] = {key: weight for block in blocks for key, weight in block.weights.items()}
    return found.values()


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


def inference_step(subject: FitModel, tokens: int, requests: int, chunk: int) -> StepBytes:
    """Run the step that completes caches of so many tokens.

    A decoder computes the last ``chunk`` tokens of all requests together, at least one of each. An encoder-decoder
    encodes (speech of full length, or as many tokens of text), and then decodes one token after the others.

    Args:
        subject: the model.
        tokens: the tokens of each request.
        requests: the number of requests.
        chunk: the most tokens that a step computes.

    Raises:
        CaptureError: SK401 if the model does not run on ``meta``.
    """
    needs = "Give a factory that returns the model and inputs with which it runs."
    with torch.no_grad(), run_on_meta(subject, "run", f"{requests} x {tokens} tokens", needs):
        model = subject.in_mode(training=False)
        if subject.example is not None:
            args, kwargs = subject.example
            return _one_run(subject, lambda: model(*args, **kwargs), (args, kwargs))
        if not getattr(model, "can_generate", lambda: False)():
            main = main_input(model, subject.config, requests, tokens)
            inputs = {getattr(model, "main_input_name", "input_ids"): main}
            return _one_run(subject, lambda: model(**inputs), inputs)
        if subject.config.is_encoder_decoder:
            return _encode_and_decode(subject, tokens, requests)
        with continued_states(model):
            return _decode(subject, tokens, requests, min(tokens, max(1, chunk // requests)))


def _one_run(subject: FitModel, work: Any, inputs: Any) -> StepBytes:
    watch = _watch(subject, None, inputs)
    watch.run(work)
    none = (0,) * len(subject.blocks)
    return StepBytes(none, _work(watch, none, none), running_order(watch.order, len(subject.blocks)))


def _decode(subject: FitModel, tokens: int, requests: int, new: int) -> StepBytes:
    model = subject.model
    names = signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    owners = _owners(subject)
    cache, before = None, (0,) * len(subject.blocks)
    if tokens > new:
        ids = torch.zeros(requests, tokens - new, dtype=torch.long)
        cache = _cache_of(subject, model(input_ids=ids, use_cache=True, **last))
        before = _cache_bytes(cache, owners, len(subject.blocks))
    taken = "past_key_values" if "past_key_values" in names else "cache_params"
    given = {taken: cache} if cache is not None else {}
    ids = torch.zeros(requests, new, dtype=torch.long)
    watch = _watch(subject, cache, ids)
    output = watch.run(lambda: model(input_ids=ids, use_cache=True, **given, **last))
    after = _cache_bytes(_cache_of(subject, output), owners, len(subject.blocks))
    return StepBytes(after, _work(watch, before, after), running_order(watch.order, len(subject.blocks)))


def _encode_and_decode(subject: FitModel, tokens: int, requests: int) -> StepBytes:
    model, owners, none = subject.model, _owners(subject), (0,) * len(subject.blocks)
    name = getattr(model, "main_input_name", "input_ids")
    main = {name: main_input(model, subject.config, requests, tokens)}
    first = torch.zeros(requests, 1, dtype=torch.long)
    encoding = _watch(subject, None, (main, first))
    output = encoding.run(lambda: model(**main, decoder_input_ids=first, use_cache=True))
    started = _cache_bytes(_cache_of(subject, output), owners, len(subject.blocks))
    work = _work(encoding, none, started)
    if tokens == 1:
        return StepBytes(started, work, running_order(encoding.order, len(subject.blocks)))
    encoded = (output.encoder_last_hidden_state,)
    ids = torch.zeros(requests, tokens - 1, dtype=torch.long)
    cache = _cache_of(subject, model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True))
    before = _cache_bytes(cache, owners, len(subject.blocks))
    watch = _watch(subject, cache, (encoded, first))
    output = watch.run(
        lambda: model(encoder_outputs=encoded, decoder_input_ids=first, past_key_values=cache, use_cache=True)
    )
    after = _cache_bytes(_cache_of(subject, output), owners, len(subject.blocks))
    return StepBytes(
        after, tuple(map(max, work, _work(watch, before, after))), running_order(encoding.order, len(subject.blocks))
    )


def _watch(subject: FitModel, cache: Any, inputs: Any) -> BlockWatch:
    """Return a watch for a run with this cache and these inputs."""
    watch = BlockWatch(subject.blocks)
    for block in subject.blocks:
        watch.hold("weights", [*block.module.parameters(), *block.module.buffers()])
    watch.hold("cache", _cached(cache))
    watch.hold("inputs", inputs)
    return watch


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
    return [one for one in tensors([*vars(layer).values()]) if one.ndim]


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


def _owners(subject: FitModel) -> dict[int, int]:
    """Return number of a layer in the cache -> the block with the module of that ``layer_idx``."""
    found: dict[int, int] = {}
    blocks = subject.blocks
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

    def hold(self, name: str, held: Any) -> None:
        """Count memory that is alive before the run under a name; the tensors themselves are not kept."""
        for tensor in tensors(held):
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
def run_on_meta(subject: FitModel, does: str, amount: str, needs: str) -> Iterator[None]:
    """Make new tensors on ``meta``, run as on a GPU with plain inputs, and raise SK401 if that fails.

    Args:
        subject: the model.
        does: what it does not if it fails: ``"run"`` or ``"train"``.
        amount: the inputs of a model with a configuration.
        needs: the remedy.
    """
    try:
        with torch.device("meta"), LikeOnGpu():
            yield
    except CaptureError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        cast = subject.cast
        inputs = amount if subject.example is None else f"the inputs of its factory{cast and f' in {cast}'}"
        reason = f"{subject.name} does not {does} on meta with {inputs}: {type(error).__name__}: {first}"
        remedy = f"Leave out dtype, or cast inside the model: it does not run in {cast}." if cast else needs
        raise CaptureError("SK401", reason, remedy) from error


# Finds the cuts of a model between devices for training as a pipeline, and the most tokens with which it fits.


@dataclass(frozen=True, eq=False)
class TrainingFit(BlockFit):
    """Answers for one model, optimizer and schedule; every answer comes from runs on ``meta``.

    Attributes:
        subject: the model.
        optimizer: the optimizer whose state counts.
        schedule: the schedule of the pipeline, with one stage on each device.
        microbatches: the microbatches in a step.
        sequences: the sequences of a microbatch.
        recompute: whether each stage saves only its inputs, and runs again before its backward.
    """

    subject: FitModel
    optimizer: str
    schedule: str
    microbatches: int
    sequences: int = 1
    recompute: bool = False
    _steps: dict[int, TrainingBytes] = field(default_factory=dict, repr=False)
    _in_flight: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def step(self, tokens: int) -> TrainingBytes:
        """Return what the blocks hold with so many tokens of each sequence."""
        if tokens not in self._steps:
            self._steps[tokens] = training_step(self.subject, tokens, self.sequences)
        return self._steps[tokens]

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """Return the most microbatches that each of so many stages holds between forward and backward.

        A step has at least one microbatch for each stage.
        """
        if stages not in self._in_flight:
            number = max(self.microbatches, stages)
            run = simulate_schedule([StageCosts(1.0, 2.0)] * stages, self.schedule, number)
            self._in_flight[stages] = run.in_flight_of_stages
        return self._in_flight[stages]

    def holds(self, step: TrainingBytes, in_flight: int, start: int, end: int) -> ByteBreakdown:
        """Return what a device holds with a range of blocks."""
        numbers = step.order[start:end]
        blocks = [self.subject.blocks[n] for n in numbers]
        trained = sum(weight.trained for weight in _weights_of(blocks))
        return ByteBreakdown(
            weights=weight_bytes(blocks),
            gradients=trained,
            optimizer=trained * STATE_OF[self.optimizer],
            activations=self.saved(step, start, end) * (in_flight - 1) + _peak(step, numbers),
        )

    def saved(self, step: TrainingBytes, start: int, end: int) -> int:
        """Return the bytes that each microbatch in flight holds: what is saved, or for recompute the inputs."""
        numbers = step.order[start:end]
        if not self.recompute or not numbers:
            return sum({key: size for n in numbers for key, size in step.saved[n].items()}.values())
        first = step.inputs[numbers[0]]
        before = {key for n in step.order[:start] for key in (*step.saved[n], *step.inputs[n])}
        given = {key: size for n in numbers for key, size in step.inputs[n].items()}
        return sum(size for key, size in given.items() if key in before or key in first)

    def holding(self, devices: int, tokens: int) -> Holding:
        """Return what each of so many devices holds with so many tokens of each sequence."""
        step, flying = self.step(tokens), self.in_flight(devices)
        return lambda device, i, j: self.holds(step, flying[device], i, j)

    def changed(self, *, keep: bool = True, **changes: object) -> TrainingFit:
        """Return it with other fields; ``keep``: with the runs that were made, which then still hold."""
        return replace(self, _steps=self._steps if keep else {}, _in_flight={}, **changes)  # type: ignore[arg-type]


def _peak(step: TrainingBytes, numbers: Sequence[int]) -> int:
    """Return the most bytes that one microbatch holds in some blocks: what is saved so far, and the work of one."""
    seen, most = dict[int, int](), 0
    for number in numbers:
        seen |= step.saved[number]
        most = max(most, sum(seen.values()) + step.work[number])
    return most


# Runs forward and backward of a model on ``meta``: what each block saves, and what it takes while it runs.


@dataclass(frozen=True)
class TrainingBytes:
    """What the blocks hold in forward and backward of one microbatch, in the order of the blocks.

    Attributes:
        saved: for each block, identity of memory -> bytes that it saves for backward, with its inputs.
        inputs: for each block, the same of its inputs alone.
        work: the most bytes alive while each block runs in forward or backward, beside weights, gradients, and what
            it and the blocks before it have saved.
        order: the numbers of the blocks in the order in which they run.
    """

    saved: tuple[Mapping[int, int], ...]
    inputs: tuple[Mapping[int, int], ...]
    work: tuple[int, ...]
    order: tuple[int, ...]


def training_step(subject: FitModel, tokens: int, sequences: int) -> TrainingBytes:
    """Run forward and backward of a microbatch.

    Args:
        subject: the model.
        tokens: tokens of each sequence.
        sequences: the number of sequences.

    Raises:
        CaptureError: SK401 if the model does not run on ``meta``, or has no loss.
    """
    needs = "Give a factory that returns the model and inputs with which it returns a loss."
    with run_on_meta(subject, "train", f"{sequences} x {tokens} tokens", needs):
        model = subject.in_mode(training=True)
        args, kwargs = subject.example or ((), loss_inputs(model, subject.config, sequences, tokens))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        run, held = _TrainingRun(subject.blocks), (*model.parameters(), *model.buffers())
        try:
            run.watch.hold("weights", held)
            run.watch.hold("gradients", [p.grad for p in model.parameters() if p.grad is not None])
            run.watch.hold("inputs", (args, kwargs))
            run.weights = set(map(memory_key, held))
            run.watch.run(lambda: run.forward_and_backward(lambda: model(*args, **kwargs), subject.name))
        finally:
            model.zero_grad(set_to_none=True)
        return run.result()


class _TrainingRun:
    """Forward and backward under a watch.

    Attributes:
        watch: records ops and lifetimes.
        weights: the identities of memory that is not an activation.
    """

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        self.blocks = blocks
        self.watch = BlockWatch(blocks)
        self.weights: set[int] = set()
        self._saved: list[dict[int, int]] = [{} for _ in blocks]
        self._inputs: list[dict[int, int]] = [{} for _ in blocks]
        self._order: list[int] = []

    def forward_and_backward(self, forward: Callable[[], Any], name: str) -> None:
        """Run both; the ops after the last block belong to it."""
        hooks = [hook for number, block in enumerate(self.blocks) for hook in self._hooks(number, block)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                output = forward()
        finally:
            for hook in hooks:
                hook.remove()
        loss = loss_of(output)
        if loss is None:
            raise CaptureError("SK401", f"{name}: {no_loss(output)}", "Return the loss.")
        del output
        self._order = [*self.watch.order]
        self.watch.enter(self.watch.current)
        loss.backward()  # type: ignore[no-untyped-call]

    def _hooks(self, number: int, block: ModelBlock) -> list[Any]:
        module = block.module
        return [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._entered(number, (args, kwargs)), with_kwargs=True
            ),
            module.register_forward_hook(lambda *given: self._left(number, given[-1])),
        ]

    def _entered(self, number: int, given: Any) -> None:
        for tensor in _graded(given):
            self._note(self._inputs[number], tensor)
            self._note(self._saved[number], tensor)

    def _left(self, number: int, output: Any) -> None:
        """Let the block run from when the gradient of its output arrives."""
        for tensor in _graded(output):
            tensor.register_hook(lambda _: self.watch.enter(number))  # type: ignore[no-untyped-call]

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(self._saved[self.watch.current], tensor)
        return tensor.detach()

    def _note(self, held: dict[int, int], tensor: Tensor) -> None:
        if (key := memory_key(tensor)) not in self.weights:
            held[key] = tensor.untyped_storage().nbytes()

    def result(self) -> TrainingBytes:
        """Return what the run has shown."""
        alive, work = self.watch.alive("weights", "gradients"), [0] * len(self.blocks)
        order = running_order(self._order, len(self.blocks))
        until, seen = dict[int, int](), dict[int, int]()
        for number in order:
            seen |= self._saved[number]
            until[number] = sum(seen.values())
        for number, start, end in self.watch.spans():
            work[number] = max(work[number], max(alive[start:end], default=0) - until[number])
        return TrainingBytes(tuple(self._saved), tuple(self._inputs), tuple(work), order)


def _graded(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(tree) if tensor.requires_grad]
