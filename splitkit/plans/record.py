"""The plan: immutable data that maps every node to the parts that compute it, its home first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx import Node

from splitkit.brief import brief, few
from splitkit.errors import PlanError, PolicyError
from splitkit.plans import file as planfile
from splitkit.plans.parts import HOST, NAMING, Claim, Part, PartKey, flaw_of_key
from splitkit.shown import Shown

ROUTINGS = ("direct", "relay")


def plan_of(given: object) -> Plan:
    """The plan that was given, or that of a `splitkit.Split`; SK301 if it is neither."""
    held = given if isinstance(given, Plan) else getattr(given, "plan", None)
    if isinstance(held, Plan):
        return held
    raise PolicyError(
        "SK301", f"a plan is wanted, not {_kind(given)}", "Make one first: plan = splitkit.plan(gm, policy)."
    )


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _where(part: Part) -> str:
    replicas = f", {part.replicas} replicas" if part.replicas > 1 else ""
    return f"{f' on {part.device}' if part.device else ''}{replicas}"


def _is_confused(key: object, other: object) -> bool:
    """Whether a key equals what it is not: something that nobody has seen, or another key of the same plan."""
    if type(key) in _SOUND:
        return False
    if isinstance(key, tuple) and any(_is_confused(item, object()) for item in key):
        return True
    try:
        return any(bool(key == stranger) or not bool(key != stranger) for stranger in (object(), HOST, other))
    except Exception:
        return True


def _require_apart(keys: Iterable[PartKey]) -> None:
    """Different keys must be unequal, or a part is taken for another, or for the host."""
    other: PartKey = object()
    for key in keys:
        if _is_confused(key, other):
            raise PlanError(
                "SK211",
                f"part {key!r} has a key of type {type(key).__name__} that equals other things",
                f"Its __eq__ must say True for itself alone. {NAMING}",
            )
        other = key


_SOUND = (type(HOST), int, str, bool, float, bytes, torch.device)


def _flaw_of_place(keys: object) -> bool:
    if not isinstance(keys, tuple) or any(map(flaw_of_key, keys)):
        return True
    return len(set(keys)) < len(keys)


@dataclass(frozen=True)
class Plan(Shown, Mapping[Node, tuple[PartKey, ...]]):
    """Node -> the parts that compute it, home first. More than one part means copies.

    A part reads its own copy of a value if it has one, else the home's copy. Nodes that a plan leaves out stay in
    `HOST`. Only placeable nodes count (``Dataflow.nodes``): inputs and the output are the host's, attributes are
    with each of their readers, and the members of a tuple are with the node that makes it. A node whose place is the
    empty tuple is computed nowhere; `splitkit.prune` gives it to nodes that nobody reads.

    In a notebook a plan draws itself as a ladder: forward, backward, what is saved, and the cuts. `view`, `to_html` and
    `to_svg` take ``costs`` (FLOPs by default), ``optimizer`` (as `splitkit.stage_costs`), ``memory`` of each device
    (``"80GiB"``: what exceeds it is red), ``run`` (a step of these stages by `splitkit.simulate_schedule`, below),
    ``beside`` (another plan: what is in another stage there) and a ``title``; SK901 where the nodes do not know the
    module that they are of, as `splitkit.split` does.

    Attributes:
        places: the mapping.
        parts: what is known of each part, in the order of their first node; `HOST` is not among them.
        note: what made the plan and what it claims.
        routing: ``"direct"``: a value goes from its home to each reader; ``"relay"``: through the parts in between.
        claim: what a policy that optimises says of the plan; what moves nodes drops it.
    """

    places: Mapping[Node, tuple[PartKey, ...]]
    parts: Mapping[PartKey, Part] = field(default_factory=dict)
    note: str = ""
    routing: Literal["direct", "relay"] = "direct"
    claim: Claim | None = None

    __repr__ = brief

    def __str__(self) -> str:
        """A line, and one for each of the first parts."""
        held = Counter(key for keys in self.places.values() for key in keys)
        lines = (f"{key}: {held[key]} nodes{_where(part)}" for key, part in self.parts.items())
        head = f"Plan of {len(self.places)} nodes in {len(self.parts)} parts{f': {self.note}' if self.note else ''}"
        return "\n".join([head, *few(lines, "parts")])

    def __post_init__(self) -> None:
        if (routing := self.routing) not in ROUTINGS:
            raise PlanError("SK206", f"the plan has routing={routing!r}", "Use 'direct' or 'relay'.")
        parts = dict(self.parts)
        for keys in self._distinct():
            for key in keys:
                if key is not HOST and key not in parts:
                    parts[key] = Part(key)
        _require_apart(parts)
        object.__setattr__(self, "parts", parts)

    def _distinct(self) -> Iterable[tuple[PartKey, ...]]:
        """The different places, in graph order; many nodes share one."""
        try:
            distinct = dict.fromkeys(self.places.values())
        except Exception:  # what hashes and compares keys is their own code
            distinct = {}
            _require_apart(
                k for keys in self.places.values() if isinstance(keys, tuple) for k in keys if not flaw_of_key(k)
            )
        if distinct and not any(map(_flaw_of_place, distinct)):
            return distinct
        for node, keys in self.places.items():
            for key in keys if isinstance(keys, tuple) else ():
                if flaw := flaw_of_key(key):
                    raise PlanError("SK206", f"{node} is placed in {key!r}: {flaw}", NAMING, [node])
            if _flaw_of_place(keys):
                raise PlanError(
                    "SK205",
                    f"{node} is placed in {keys!r}; a place is a tuple of different parts, home first",
                    "Use Plan.of({node: part}) to give each node one part.",
                    [node],
                )
        return distinct

    def __getitem__(self, node: Node) -> tuple[PartKey, ...]:
        return self.places[node]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def of(cls, labels: Mapping[Node, PartKey | list[PartKey]], note: str = "") -> Plan:
        """A plan from one label a node; a *list* of labels means copies, home first."""
        if not isinstance(labels, Mapping):
            raise PlanError("SK205", f"Plan.of was given {_kind(labels)}", "Give a mapping: Plan.of({node: part}).")
        places = {n: tuple(label) if isinstance(label, list) else (label,) for n, label in labels.items()}
        return cls(places, note=note)

    def home(self, node: Node) -> PartKey:
        """The part whose copy others read."""
        keys = self.places.get(node)
        return keys[0] if keys else HOST

    def source(self, node: Node, reader: PartKey) -> PartKey:
        """Where part ``reader`` takes the value of ``node`` from: its own copy if it has one, else the home's."""
        keys = self.places.get(node) or (HOST,)
        return reader if reader in keys else keys[0]

    def members(self, key: PartKey) -> tuple[Node, ...]:
        """The nodes that part ``key`` computes."""
        return tuple(n for n, keys in self.places.items() if key in keys)

    def place(self, changes: Mapping[Node, tuple[PartKey, ...]]) -> Plan:
        """The plan with some nodes placed elsewhere."""
        return replace(self, places={**self.places, **changes}, claim=None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data, by node name; see `splitkit.plans.file`."""
        return planfile.encode(planfile.Fields(self.places, self.parts, self.note, self.routing, self.claim))

    @staticmethod
    def from_dict(graph: fx.Graph, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict` for the same graph (SK501, SK502, SK503 otherwise)."""
        return Plan(*planfile.decode(graph, data))

    def save(self, path: str) -> None:
        """Write the plan as JSON, atomically."""
        planfile.write(path, self.to_dict())

    @staticmethod
    def load(path: str, graph: fx.Graph) -> Plan:
        """Read a plan that was made for ``graph``; runs no code from the file."""
        return Plan.from_dict(graph, planfile.read(path))
