"""Find which values each part of a staged training step receives, and from which part.

The parts of one microbatch run in one line, and a value goes along the arrows only::

    forward 0  ─>  forward 1  ─>  forward 2        activations
        │              │              │            saved values
        v              v              v
    backward 0 <─  backward 1 <─  backward 2       gradients

Where backward is two graphs, ``input`` stands in the place of ``backward``, and ``weight`` of the same stage takes what
it reads from ``forward`` and ``input`` of its stage and gives nothing to other parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from splitkit.errors import CycleError
from splitkit.plans.parts import PartKey
from splitkit.training.stage_parts import StagePart

Places = Mapping[Node, tuple[PartKey, ...]]


@dataclass(frozen=True)
class StageLine:
    """The parts of a staged plan in the order in which one microbatch visits them.

    Attributes:
        split: for each stage, whether its backward is two graphs.
    """

    split: tuple[bool, ...]

    @property
    def stages(self) -> range:
        """The numbers of the stages."""
        return range(len(self.split))

    def backward(self, stage: int) -> StagePart:
        """The part that computes the gradients that leave a stage."""
        return StagePart("input" if self.split[stage] else "backward", stage)

    @property
    def parts(self) -> tuple[StagePart, ...]:
        """All parts, in order: forward up, backward down, weight right after the input part of its stage."""
        found = [StagePart("forward", stage) for stage in self.stages]
        for stage in reversed(self.stages):
            found += [self.backward(stage), *([StagePart("weight", stage)] if self.split[stage] else [])]
        return tuple(found)

    def before(self, part: StagePart) -> tuple[StagePart, ...]:
        """The parts from which a part may take values, the preferred one first."""
        half, stage = part
        if half == "forward":
            return (StagePart("forward", stage - 1),) if stage else ()
        if half == "weight":
            return StagePart("forward", stage), StagePart("input", stage)
        above = (self.backward(stage + 1),) if stage + 1 < len(self.split) else ()
        return (StagePart("forward", stage), *above)


@dataclass
class StageTraffic:
    """What the parts of a plan take from each other.

    Attributes:
        line: the parts.
        places: node -> the parts in which it is computed, or given as an input.
        taken: part -> value that it takes -> the part that it takes the value from.
    """

    line: StageLine
    places: Places
    taken: dict[StagePart, dict[Node, StagePart]] = field(default_factory=dict)

    def take(self, part: StagePart, values: Iterable[Node], why: str) -> None:
        """Let a part have these values.

        Raises:
            CycleError: SK203 for a value that no part before it has; ``why`` says what it is needed for.
        """
        for value in values:
            self._take(part, value, why)

    def _take(self, part: StagePart, value: Node, why: str) -> None:
        while part not in self.places[value] and value not in self.taken.setdefault(part, {}):
            source = next((p for p in self._sources(part, value) if self._has(value, p)), None)
            if source is None:
                raise _cycle(part, value, self.places[value], why)
            self.taken[part][value] = source
            part = source

    def _sources(self, part: StagePart, value: Node) -> tuple[StagePart, ...]:
        """Return the parts from which a part may take a value, the preferred one first.

        What the input part recomputes waits for the weight part; if the weight part took forward's copy, forward would
        have to save what the plan recomputes.
        """
        early = StagePart("input", part.stage)
        if part.half == "weight" and early in self.places[value]:
            return (early,)
        return self.line.before(part)

    def _has(self, value: Node, part: StagePart) -> bool:
        """Whether a part computes a value, or can take it."""
        stack = [part]
        while stack:
            part = stack.pop()
            if part in self.places[value] or value in self.taken.get(part, {}):
                return True
            stack += self.line.before(part)
        return False

    def between(self, source: StagePart, target: StagePart) -> list[Node]:
        """Return the values that one part takes from another, in the order in which they were asked for."""
        return [value for value, origin in self.taken.get(target, {}).items() if origin == source]


def _cycle(part: StagePart, value: Node, places: tuple[PartKey, ...], why: str) -> CycleError:
    where = f"computed in {', '.join(map(_named, places))}" if places else "computed nowhere"
    return CycleError(
        "SK203",
        f"{_named(part)} needs {value.name} {why}, but it is {where}, which does not run before it",
        "Activations go only to later stages, gradients only to earlier ones; 'weight' sends nothing to other parts.",
        [value],
    )


def _named(key: PartKey) -> str:
    return f"{key[0]!r} of stage {key[1]}" if isinstance(key, tuple) else repr(key)
