"""Splits a batch into microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.call_signature import input_binder
from splitkit.graph.size_expressions import evaluated
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_sizes import StepSizes


class BatchSplitter:
    """Splits the inputs and targets of a step, by the shapes with which the graph was captured."""

    def __init__(
        self, chain: Chain, microbatches: int, device: torch.device, needed: Collection[str] | None = None
    ) -> None:
        self._binder, self._count, self._device = input_binder(chain.split.module), microbatches, device
        self._wanted, self._sizes = chain.facts.inputs, chain.facts.sizes
        self._needed = self._wanted.keys() if needed is None else needed
        shapes = self._sizes.inputs.items()
        self._by_rows = [name for name, shape in shapes if shape and shape[0] in self._sizes.rows]

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch, by the names that they have in the graph.

        If the graph has symbolic sizes, the rows are shared out as evenly as possible. An input that this rank does not
        read may be missing, or ``None``.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take, or of another dtype or shape than captured.
        """
        values = self._bound(args, kwargs)
        changed = self._has_other_sizes(values)
        sizes = self._shared_out(values) if changed else []
        made: list[dict[str, Any]] = [{} for _ in range(self._count)]
        for name, value in values.items():
            parts = self._sized(name, value, sizes) if changed else self._parts(name, value)
            for inputs, part in zip(made, parts, strict=True):
                inputs[name] = part
        return made

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a step by their names in the graph, as they are given: for all microbatches together.

        Without an input that this rank does not read there is no whole batch, and nothing is returned.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take.
        """
        given = kwargs.get("microbatches")
        if given is None:
            found = self._bound(args, {name: value for name, value in kwargs.items() if name != "microbatches"})
            left_out = any(found[name] is None and like is not None for name, like in self._wanted.items())
            return {} if left_out else found
        each = [self._bound((), inputs) for inputs in given]
        return {name: [inputs[name] for inputs in each] for name in self._wanted}

    def given(self, microbatches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch as `split` does, where the caller has split the batch.

        Args:
            microbatches: the keyword inputs of each microbatch.

        Raises:
            PipelineError: SK802 for another number of microbatches, and as in `split`.
        """
        if len(microbatches) != self._count:
            raise PipelineError(
                "SK802",
                f"{len(microbatches)} microbatches are given, and a step has {self._count}",
                f"Give {self._count}, or make the pipeline with microbatches={len(microbatches)}.",
            )
        made = [self._bound((), inputs) for inputs in microbatches]
        for inputs in made:
            for name, value in inputs.items():
                like = self._wanted[name]
                if isinstance(value, torch.Tensor) and like is not None:
                    fits = value.shape == like.shape if not self._sizes.inputs else value.dim() == like.dim()
                    if value.dtype != like.dtype or not fits:
                        wants = f"{_dtype(like)}{list(like.shape)}"
                        raise _unfit(name, value, f"Give each microbatch {wants}, as captured.")
                    inputs[name] = value.to(self._device)
        return made

    def with_target(self, kwargs: Mapping[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """Return the keyword arguments and the target of a step, with the target among the former if it is an input."""
        if "target" not in self._wanted:
            return dict(kwargs), target
        given = kwargs.get("microbatches")
        if given is None:
            return {**kwargs, "target": target}, None
        if target is None:
            return dict(kwargs), None
        pairs = zip(given, self.given_targets(target), strict=False)
        return {**kwargs, "microbatches": [{**inputs, "target": own} for inputs, own in pairs]}, None

    def sizes(self, inputs: Sequence[Mapping[str, Any]]) -> StepSizes:
        """Return the sizes of the microbatches of a step.

        Args:
            inputs: the inputs of each microbatch, as `split` returns them.

        Raises:
            PipelineError: SK802 for sizes that the graph does not allow.
        """
        found = tuple(self._sizes.bound(each) for each in inputs)
        rows = self._sizes.rows
        return StepSizes(found, tuple(each[rows[0]] if rows else 1 for each in found))

    def targets(self, target: Any, rows: Sequence[int]) -> list[Any]:
        """Return the target of each microbatch.

        Args:
            target: a tensor or a tree of them, with all microbatches concatenated in dimension 0.
            rows: the rows of each microbatch.

        Raises:
            PipelineError: SK802 if the rows of a tensor cannot be shared out like the rows of the inputs.
        """
        leaves, spec = pytree.tree_flatten(target)
        parts = [self._shares(leaf, rows) for leaf in leaves]
        return [pytree.tree_unflatten([part[i] for part in parts], spec) for i in range(self._count)]

    def given_targets(self, target: Any) -> list[Any]:
        """Return the target of each microbatch from a list of them; ``None`` is for all.

        Raises:
            PipelineError: SK802 for another number of them.
        """
        made = [None] * self._count if target is None else list(target)
        if len(made) != self._count:
            raise PipelineError(
                "SK802", f"{len(made)} targets for {self._count} microbatches", "Give the target of each microbatch."
            )
        return list(pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device), made))

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        missing = [name for name in [*self._wanted][len(args) :] if name not in kwargs and name not in self._needed]
        try:
            values = self._binder(*args, **kwargs, **dict.fromkeys(missing))
        except Exception as error:
            reason = f"the graph does not take these arguments: {error}"
            raise PipelineError("SK802", reason, "Give the inputs of the model.") from error
        found = dict(zip(self._wanted, values, strict=True))
        for name in self._sizes.inputs:
            if not isinstance(found[name], torch.Tensor):
                raise PipelineError("SK802", f"{name} is a {type(found[name]).__name__}", "Give a tensor.", [name])
        return found

    def _has_other_sizes(self, values: Mapping[str, Any]) -> bool:
        """Whether symbolic sizes differ from those at capture: in some input, or because no input is a whole batch."""
        if not self._sizes.inputs or not all(self._is_captured(name, value) for name, value in values.items()):
            return bool(self._sizes.inputs)
        whole = [list(values[name].shape) == self._whole(self._wanted[name]) for name in self._by_rows]
        return bool(whole) and not any(whole)

    def _is_captured(self, name: str, value: Any) -> bool:
        """Whether a value is one microbatch as captured, or all of them."""
        like = self._wanted[name]
        if not isinstance(value, torch.Tensor) or like is None:
            return True
        return list(value.shape) in (list(like.shape), self._whole(like))

    def _whole(self, like: torch.Tensor | None) -> list[int]:
        shape = [] if like is None else list(like.shape)
        return [shape[0] * self._count, *shape[1:]] if shape else shape

    def _parts(self, name: str, value: Any) -> list[Any]:
        like = self._wanted[name]
        if value is None and like is not None and name in self._needed:
            raise PipelineError("SK802", f"{name} is None, but this rank reads it", "See Pipeline.needs.", [name])
        if not isinstance(value, torch.Tensor) or like is None:
            return [value] * self._count
        whole = self._whole(like)
        if value.dtype != like.dtype or not self._is_captured(name, value):
            remedy = f"Give {_dtype(like)}{whole}: {self._count} microbatches of {list(like.shape)}, as captured."
            if not self._sizes.inputs:
                remedy += " For other sizes, capture with dynamic=True; for a smaller last batch, drop_last=True."
            raise _unfit(name, value, remedy)
        value = value.to(self._device)
        return list(value.chunk(self._count)) if list(value.shape) == whole and like.dim() else [value] * self._count

    def _shared_out(self, values: Mapping[str, Any]) -> list[dict[str, int]]:
        """Return the sizes of each microbatch, with the rows shared out as evenly as possible.

        Inputs that had other rows than the first one at capture, and have as many again, are not part of the batch.

        Raises:
            PipelineError: SK802 if inputs have different numbers of rows, or fewer than there are microbatches.
        """
        known = self._sizes
        rest = [zip(shape[1:], values[name].shape[1:], strict=False) for name, shape in known.inputs.items()]
        others = {**known.captured, **{size: n for sizes in rest for size, n in sizes if isinstance(size, str)}}
        at_capture = [(name, str(known.inputs[name][0])) for name in self._by_rows]
        counts, symbols = dict[str, int](), dict[str, None]()
        for name, symbol in at_capture:
            found, captured = values[name].shape[:1].numel(), known.captured[symbol]
            if captured == known.captured[at_capture[0][1]] or found != captured:
                counts[name], symbols[symbol] = found, None
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {rows}" for name, rows in counts.items())
            raise PipelineError(
                "SK802",
                f"the inputs have different numbers of rows: {listed}",
                "Give all inputs the same number of rows, or pass each microbatch: step(microbatches=[...]).",
                sorted(counts),
            )
        total = next(iter(counts.values()), self._count)
        if total < self._count:
            raise PipelineError(
                "SK802",
                f"{next(iter(counts))} has {total} rows for {self._count} microbatches",
                f"Give {self._count} rows or more, or leave the last batch out (drop_last=True in a DataLoader).",
                sorted(counts),
            )
        each = [total // self._count + (i < total % self._count) for i in range(self._count)]
        return [{**others, **dict.fromkeys(symbols, rows)} for rows in each]

    def _sized(self, name: str, value: Any, sizes: Sequence[Mapping[str, int]]) -> list[Any]:
        """Return the value of each microbatch for an input of a graph with symbolic sizes."""
        like, shape = self._wanted[name], self._sizes.inputs.get(name)
        if like is None or shape is None or not isinstance(value, torch.Tensor):
            return [value] * self._count
        wanted = [[evaluated(size, each) for size in shape] for each in sizes]
        first, given = wanted[0], list(value.shape)
        rows = [each[0] for each in wanted if each]
        if value.dtype == like.dtype and len(given) == len(first) and all(given[1:] == each[1:] for each in wanted):
            if rows and given[0] == sum(rows):
                return list(torch.split(value.to(self._device), rows))
            if all(given == each for each in wanted):
                return [value.to(self._device)] * self._count
        whole = [sum(rows), *first[1:]] if rows else []
        raise _unfit(name, value, f"Give {_dtype(like)}{whole}, which fits the other inputs.")

    def _shares(self, leaf: Any, rows: Sequence[int]) -> list[Any]:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return [leaf] * self._count
        even, found = len(set(rows)) == 1, leaf.shape[0]
        if found % (self._count if even else sum(rows)):
            raise PipelineError(
                "SK802",
                f"the target has {found} rows for {self._count} microbatches"
                + ("" if even else f" of {', '.join(map(str, rows))} rows"),
                f"Give a multiple of {self._count if even else sum(rows)}.",
            )
        each = [found // self._count] * self._count if even else [n * (found // sum(rows)) for n in rows]
        return list(torch.split(leaf.to(self._device), each))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unfit(name: str, value: torch.Tensor, remedy: str) -> PipelineError:
    return PipelineError("SK802", f"{name} is {_dtype(value)}{list(value.shape)}", remedy, [name])
