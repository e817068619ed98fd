"""The plan: an immutable mapping from every node to the parts that compute it, its home first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch.fx import Node

from splitkit.display import Shown, ShownOverTime
from splitkit.errors import PlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, bookkeeping
from splitkit.graph.shared_memory import NO_MEMORY, Memory, memory_classes
from splitkit.graph.storages import attribute
from splitkit.plans import plan_file
from splitkit.plans.parts import (
    NAMING,
    PARENT,
    Claim,
    Offloaded,
    Part,
    PartKey,
    PlannedOptimizer,
    PlanRequest,
    flaw_of_key,
)
from splitkit.price_record import PriceRecord
from splitkit.prices import Costs
from splitkit.short_repr import brief, few

if TYPE_CHECKING:
    from splitkit.files import PathLike


# The methods `view`, `to_html`, `to_svg` and `explain` that plans and splits share.


OtherPlan = Mapping[Node, tuple[PartKey, ...]]
"""Another plan of the same graph to compare with; a `splitkit.Plan` is such a mapping."""


class ShownPlan(Shown):
    """An object that is drawn as a plan of a graph."""

    def explain(
        self, where: object = None, *, policy: object = None, costs: Costs | None = None, again: bool = True
    ) -> Any:
        """Explain why the plan is as it is: what limits it, how far from the best it may be, what would help.

        The explanation prints as text, has ``to_dict()``, and a notebook shows it as HTML.

        Args:
            where: a node or its name, to explain instead of the whole plan.
            policy: the policy whose limits hold (memory, schedule, links); by default the one that made the plan, if
                the plan has recorded it.
            costs: the prices; by default those that the plan was made with.
            again: whether to plan again with one more device, one fewer, and more memory; that takes as long as
                planning.

        Raises:
            PlanError: SK314 if the graph has no such node.
            PolicyError: SK301 if ``policy`` is not a policy.
        """
        return Shown.explainer()(self, where, policy=policy, costs=costs, again=again)

    def view(
        self,
        *,
        height: int | None = None,
        live: bool = False,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> Any:
        """Return an interactive page in a frame, which a notebook shows if this is the last line of a cell.

        Args:
            height: height of the frame in pixels.
            live: return a widget that plans again in Python when the number of stages changes, and whose ``plan``
                follows the stages as they are dragged. This needs ``pip install anywidget``.
            costs: prices of the nodes; by default those that the plan was made with, or FLOPs if it does not know them.
            optimizer: as for `splitkit.stage_costs`: by default what the plan was made for; ``None`` for inference. A
                plan of a joint graph ignores it.
            memory: the memory of each device in bytes (or ``"80GiB"``); stages that exceed it are red.
            run: a step of these stages, as `splitkit.simulate_schedule` returns it; its timeline is drawn below, which
                needs prices in seconds.
            measured: what the ranks did when the step ran (`splitkit.runtime.StepRecorder.measured`, or
                `MeasuredStep.load` of a trace file), drawn beside the actions of ``run``, which must
                be the same: ``run=sk.simulate_schedule(stages, measured.order)``.
            beside: another plan of the graph to compare with, or several; rows that one of them puts into another stage
                are marked.
            title: the text above the picture; by default the note of the plan.

        Raises:
            ViewError: SK901 if the plan cannot be drawn, or not with these options; SK902 if ``live`` is given and
                anywidget is not installed; SK903 for a step by prices that are not times.
        """
        return self._framed(
            height,
            live,
            costs=costs,
            optimizer=optimizer,
            memory=memory,
            run=run,
            measured=measured,
            beside=beside,
            title=title,
        )

    def to_html(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> None:
        """Write the page as one file that any browser shows, or the still picture if its name ends in ``.svg``.

        The options are those of `view`.

        Raises:
            ViewError: SK901 if the plan cannot be drawn, or not with these options.
            FileError: SK504 if the file cannot be written; an existing file is then left as it was.
        """
        options = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": run, "measured": measured}
        self._write_html(path, **options, beside=beside, title=title)

    def to_svg(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> None:
        """Write a static picture; the options are those of `view`, the errors those of `to_html`."""
        options = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": run, "measured": measured}
        self._write_svg(path, **options, beside=beside, title=title)


ROUTINGS = ("direct", "relay")


def plan_of(given: object) -> Plan:
    """Return the given plan, or the plan of the given `splitkit.engine.split.Split`; raise SK301 for anything else."""
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


# Puts counters and running ranges into the part of their module, where a policy has put them into another.


def keep_books(flow: Dataflow, plan: Plan) -> Plan:
    """Return the plan with what only keeps a module's books in the part of its module, and without parts left empty.

    A border of a policy that follows the order of the graph may fall between the two. If nothing moves, the plan itself
    is returned.
    """
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for owner, *books in flow.fact(bookkeeping):
        home = plan.places.get(owner, ())
        made = {plan.places.get(first) for node in books for first in flow.waits[node] if first not in books}
        # what they compute from is there, and nothing reads them: no cycle of parts can close
        if len(home) == 1 and made <= {home} and all(len(plan.places.get(node, ())) == 1 for node in books):
            changes |= {node: home for node in books if plan.places[node] != home}
    if not changes:
        return plan
    placed = plan.place(changes)
    used = {key for keys in placed.places.values() for key in keys}
    return replace(placed, parts={key: part for key, part in placed.parts.items() if key in used})


# Parts that backward runs again (``Part.call="checkpoint"``): make a plan's parts so, and check that they can be.


NOTE = "numbers are without recompute, which was chosen afterwards"
"""What the note of a plan says whose parts were all made so."""


def checkpointed(plan: Plan) -> Plan:
    """Return the plan with parts that save only their inputs and are recomputed in backward (activation checkpointing).

    Its claim is dropped and its note says so, since both were made without recompute.
    """
    parts = {key: replace(part, call="checkpoint") for key, part in plan.parts.items()}
    if parts == plan.parts:
        return plan
    return replace(plan, parts=parts, claim=None, note=f"{plan.note}; {NOTE}" if plan.note else "")


def check_checkpoints(flow: Dataflow, plan: Plan) -> None:
    """Raise SK207 for nodes that ``torch.utils.checkpoint`` could not run again in backward.

    It replays random numbers and asserts. It cannot undo a write or a print, nor a later write to a value that the
    part read.
    """
    again = {key for key, part in plan.parts.items() if part.call == "checkpoint"}
    for node in _fixed_in_time(flow, plan) if again else ():
        for key in plan.places.get(flow.producer(node), ()):
            if key is not PARENT and key in again:
                raise PlanError(
                    "SK207",
                    f"part {key!r} is checkpointed and would run {node.name} again in backward, "
                    f"but {flow.once.get(node, 'another node writes the memory that it reads')}",
                    "Move the node to another part, or use call='plain' for that part.",
                    [node],
                )


def _fixed_in_time(flow: Dataflow, plan: Plan) -> dict[Node, None]:
    """Return the nodes that must not run again later: impure nodes, writers, and readers of written memory."""
    impure = (n for n, e in flow.effects.items() if not e.known or e.impure or e.ambient)
    seeded = (n for n, e in flow.effects.items() if e.random and _has_generator(flow, n))
    return dict.fromkeys([*impure, *seeded, *_users_of_written(flow, plan)])


def _users_of_written(flow: Dataflow, plan: Plan) -> Iterator[Node]:
    """Yield writers and readers of written memory; opaque code counts with its arguments only.

    Memory that a part makes, and that no other part writes, does not count: each run of the part makes it anew.
    """
    found = memory_classes(flow.effects, flow.root)
    memory = Memory(found.members, found.written)
    running = ((n, e) for n, e in flow.effects.items() if n.op not in ("placeholder", "get_attr", "output"))
    uses = {n: memory.use(n, e) for n, e in running if n not in flow.followers}
    written = {c for writes, _ in uses.values() for c in writes} - NO_MEMORY
    makers: dict[Hashable, set[PartKey]] = {}
    for item, c in found.members.items():
        own = plan.places.get(flow.producer(item)) if isinstance(item, Node) and item.op.startswith("call") else None
        makers.setdefault(c, set()).update(own or (PARENT,))
    for node, (writes, _) in uses.items():
        for c in writes:
            makers.setdefault(c, set()).update(plan.places.get(flow.producer(node), (PARENT,)))
    shared = found.reached | found.lent
    written -= {c for c, keys in makers.items() if len(keys) == 1 and PARENT not in keys and c not in shared}
    return (n for n, (_, touched) in uses.items() if not written.isdisjoint(touched))


def _has_generator(flow: Dataflow, node: Node) -> bool:
    """Whether ``node`` draws from a generator of its own, whose state checkpoint does not restore."""
    read = [attribute(flow.root, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    inputs = any(
        n.op == "placeholder" and not isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes
    )
    return inputs or any(isinstance(v, torch.Generator) for v in (*read, *node.args, *node.kwargs.values()))
