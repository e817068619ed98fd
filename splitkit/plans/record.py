"""The plan: an immutable mapping from every node to the parts that compute it, its home first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.fx import Node

from splitkit.errors import PlanError, PolicyError
from splitkit.plans import plan_file
from splitkit.plans.offloaded import Offloaded
from splitkit.plans.parts import NAMING, PARENT, Claim, Part, PartKey, flaw_of_key
from splitkit.plans.plan_display import ShownPlan
from splitkit.plans.plan_request import PlanRequest
from splitkit.price_record import PriceRecord
from splitkit.short_repr import brief, few

ROUTINGS = ("direct", "relay")


def plan_of(given: object) -> Plan:
    """Return the given plan, or the plan of the given `splitkit.Split`; raise SK301 for anything else."""
    held = given if isinstance(given, Plan) else getattr(given, "plan", None)
    if isinstance(held, Plan):
        return held
    raise PolicyError(
        "SK301", f"expected a plan, not {_kind(given)}", "Make one first: plan = splitkit.plan(gm, policy)."
    )


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _where(part: Part) -> str:
    replicas = f", {part.replicas} replicas" if part.replicas > 1 else ""
    return f"{f' on {part.device}' if part.device else ''}{replicas}"


def _is_confused(key: object, other: object) -> bool:
    """Whether a key equals an unrelated object: a new one, the parent's key, or another key of the same plan."""
    if type(key) in _SOUND:
        return False
    if isinstance(key, tuple) and any(_is_confused(item, object()) for item in key):
        return True
    try:
        return any(bool(key == stranger) or not bool(key != stranger) for stranger in (object(), PARENT, other))
    except Exception:
        return True


def _require_apart(keys: Iterable[PartKey]) -> None:
    """Raise SK211 if a key equals others: a part would then be taken for another part, or for the parent."""
    other: PartKey = object()
    for key in keys:
        if _is_confused(key, other):
            raise PlanError(
                "SK211",
                f"part {key!r} has a key of type {type(key).__name__} that equals unrelated objects",
                f"Its __eq__ must return True only for equal keys. {NAMING}",
            )
        other = key


_SOUND = (type(PARENT), int, str, bool, float, bytes, torch.device)


def _flaw_of_place(keys: object) -> bool:
    if not isinstance(keys, tuple) or any(map(flaw_of_key, keys)):
        return True
    return len(set(keys)) < len(keys)


@dataclass(frozen=True)
class Plan(ShownPlan, Mapping[Node, tuple[PartKey, ...]]):
    """A mapping from every node to the parts that compute it, its home first. Several parts mean copies.

    A part reads its own copy of a value if it has one, otherwise the copy of the home. Nodes that a plan leaves out
    stay in `PARENT`. Only placeable nodes (``Dataflow.nodes``) need a place: inputs and the output belong to the
    parent, attributes to each of their readers, and the members of a tuple to the node that makes the tuple. A node
    whose place is the empty tuple is computed nowhere; `splitkit.extend.prune` gives that place to nodes that nobody
    reads.

    A notebook shows a plan as a ladder: forward, backward, the saved values and the borders. `view` is an interactive
    page. Both raise SK901 if the nodes belong to a graph without a module.

    Attributes:
        places: node -> the parts that compute it, its home first.
        parts: the properties of each part, in the order of their first nodes; `PARENT` is not among them.
        note: what made the plan, and its claim as text.
        routing: ``"direct"``: a value goes from its home to each reader; ``"relay"``: through the parts in between.
        claim: the proven quality of the plan, if the policy optimises; any method that moves nodes drops it.
        prices: the prices that the plan was made with, if a policy made it. Pictures, reports and
            `splitkit.stage_costs` use them unless you pass others. Plans that differ only in their prices are equal.
        offloaded: saved values of a training step that wait for backward in host memory. They are values that forward
            computes and backward takes.
        request: what the plan was made for: purpose, schedule, links, memory and devices. Whatever is read from a plan
            (reports, pictures, explanations, exports) is priced for it. Plans that differ only in it are equal.
        policy: the policy that made the plan, as an expression (``"Stages(4, schedule='1f1b')"``), so that an
            explanation knows its limits; empty if the policy cannot be written this way. Plans that differ only in
            their policy are equal.
    """

    places: Mapping[Node, tuple[PartKey, ...]]
    parts: Mapping[PartKey, Part] = field(default_factory=dict)
    note: str = ""
    routing: Literal["direct", "relay"] = "direct"
    claim: Claim | None = None
    prices: PriceRecord | None = field(default=None, compare=False)
    offloaded: tuple[Offloaded, ...] = ()
    policy: str = field(default="", compare=False)
    request: PlanRequest = field(default_factory=PlanRequest, compare=False)

    __repr__ = brief

    def __str__(self) -> str:
        """Return a header line and a line for each of the first parts."""
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
                if key is not PARENT and key not in parts:
                    parts[key] = Part(key)
        _require_apart(parts)
        object.__setattr__(self, "parts", parts)

    def _distinct(self) -> Iterable[tuple[PartKey, ...]]:
        """Return the distinct places in graph order, after checking them; many nodes share one."""
        try:
            distinct = dict.fromkeys(self.places.values())
        except Exception:  # the keys' own __hash__ or __eq__ raised
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
                    f"{node} is placed in {keys!r}; a place is a tuple of distinct parts, the home first",
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
        """Return a plan from one label per node; a *list* of labels means copies, the home first."""
        if not isinstance(labels, Mapping):
            raise PlanError("SK205", f"Plan.of was given {_kind(labels)}", "Give a mapping: Plan.of({node: part}).")
        places = {n: tuple(label) if isinstance(label, list) else (label,) for n, label in labels.items()}
        return cls(places, note=note)

    def home(self, node: Node) -> PartKey:
        """Return the part whose copy of ``node`` other parts read."""
        keys = self.places.get(node)
        return keys[0] if keys else PARENT

    def source(self, node: Node, reader: PartKey) -> PartKey:
        """Return the part from which ``reader`` takes the value of ``node``: itself if it has a copy, else the home."""
        keys = self.places.get(node) or (PARENT,)
        return reader if reader in keys else keys[0]

    def members(self, key: PartKey) -> tuple[Node, ...]:
        """Return the nodes that part ``key`` computes."""
        return tuple(n for n, keys in self.places.items() if key in keys)

    def place(self, changes: Mapping[Node, tuple[PartKey, ...]]) -> Plan:
        """Return the plan with some nodes placed elsewhere, without its claim."""
        return replace(self, places={**self.places, **changes}, claim=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data, by node name; see `splitkit.plans.plan_file`."""
        return plan_file.encode_plan(plan_file.PlanFields(**{f.name: getattr(self, f.name) for f in fields(self)}))

    @staticmethod
    def from_dict(graph: fx.Graph, data: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote, for the same graph; raise SK501, SK502 or SK503 for other data."""
        return Plan(*plan_file.decode_plan(graph, data))

    def save(self, path: str) -> None:
        """Write the plan as JSON, atomically."""
        plan_file.write_json(path, self.to_dict())

    @staticmethod
    def load(path: str, graph: fx.Graph) -> Plan:
        """Read a plan that was made for ``graph``; no code from the file is run."""
        return Plan.from_dict(graph, plan_file.read_json(path))


def module_of_plan(plan: Plan) -> fx.GraphModule | None:
    """Return the graph module whose nodes a plan places; ``None`` if it places none, or that module is gone."""
    graph = next(iter(plan)).graph if plan else None
    root = None if graph is None else graph.owning_module
    return root if isinstance(root, fx.GraphModule) and root.graph is graph else None
