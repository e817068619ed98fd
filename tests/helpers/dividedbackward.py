"""The oracle of divided backwards: every legal division by definition, and an interpreter of the parts of a plan."""

from __future__ import annotations

from itertools import product
from operator import getitem

import torch
from hypothesis import strategies as st
from jointgraphs import Hand
from torch import fx
from torch.fx import Node
from waitingvalues import waiting_bytes, waiting_values

from splitkit.plans.parts import PARENT
from splitkit.training.flow import BACKWARD
from splitkit.training.stage_parts import stage_part

aten = torch.ops.aten
PLACES = ((), ("I",), ("W",), ("I", "W"))


def legal_divisions(flow, plan, seconds, fixed=(), once=False):
    """(bytes, seconds, {op: places}) of every legal division of the backward of a plan, straight from the definition.

    Args:
        flow: facts about the joint graph.
        plan: a plan with the parts "forward" and "backward".
        seconds: the time of an op.
        fixed: ops that run in the weight part only.
        once: whether an op that takes time runs in one part only.
    """
    ops = [n for n in flow.nodes if BACKWARD in plan[n]]
    members = {op: [n for n in flow.scope if flow.producer(n) is op] for op in ops}
    read = {op: {r for m in members[op] for r in m.all_input_nodes if flow.producer(r) is not op} for op in ops}
    views = {op for op in ops if op.target is aten.alias.default}
    returned = {flow.producer(n) for n in flow.gradients if isinstance(n, Node)}
    sent = {flow.producer(n) for n in flow.input_gradients}
    must = {op for op in ops if op in sent or op in flow.once}
    stack = list(must)
    while stack:
        new = {flow.producer(r) for r in read[stack.pop()]} & set(ops) - must
        must |= new
        stack += new
    for places in product(PLACES, repeat=len(ops)):
        at = dict(zip(ops, places, strict=True))
        if all(
            _is_legal(op, at, read[op], flow)
            and (op not in returned or at[op])
            and (op not in sent or "I" in at[op])
            and (op not in flow.once or at[op] == ("I",))
            and (op not in fixed or at[op] == ("W",))
            and not (once and len(at[op]) == 2 and op not in views and seconds(op))
            for op in ops
        ):
            late = (r for op in ops if "W" in at[op] for r in read[op] if "W" not in at.get(flow.producer(r), ()))
            held = {}
            for value in late:
                base = value
                while base.target is aten.alias.default:
                    base = base.args[0]
                if base.op != "placeholder" or base in flow.backward_inputs:
                    copied = flow.producer(value) in at and flow.producer(base) in at
                    held[base, copied] = base.meta["val"].untyped_storage().nbytes()
            times = {op: 0.0 if op in views else seconds(op) for op in ops}
            spent = sum(times[op] * (("I" in p and op not in must) + (len(p) == 2)) for op, p in at.items())
            yield sum(held.values()), spent, at


def _is_legal(op, at, read, flow):
    for half in at[op]:
        for value in read:
            maker = flow.producer(value)
            if maker in at and half not in at[maker] and (half == "I" or "I" not in at[maker]):
                return False
    return True


@st.composite
def small_backwards(draw):
    """A joint graph with up to five ops in backward, and the prices of its ops by name."""
    h = Hand().inputs(x=draw(st.integers(1, 4)), w=2).gradients(g=draw(st.integers(1, 4)))
    sizes = st.integers(1, 5)

    def some(names, most=2):
        return draw(st.lists(st.sampled_from(names), min_size=1, max_size=most, unique=True))

    early = ["x", "w"]
    for i in range(draw(st.integers(1, 3))):
        early.append(_drawn(draw, h, f"f{i}", draw(sizes), some(early), "is_forward"))
    h.op("loss", 1, early[-1])
    late, names = ["g"], []
    for i in range(draw(st.integers(2, 5))):
        reads = list(dict.fromkeys([*some(late), *(some(early) if draw(st.booleans()) else [])]))
        names.append(_drawn(draw, h, f"b{i}", draw(sizes), reads, "is_backward"))
        late.append(names[-1])
    returned = list(dict.fromkeys([names[-1], *some(names)]))
    flow = h.flow("loss", " ".join(returned))
    sent = [h[n] for n in returned if draw(st.booleans())]
    prices = {name: float(draw(st.sampled_from([0, 1, 2, 5]))) for name in (*early, *late, *h.nodes)}
    return type(flow).of(flow, flow.backward_inputs, flow.forward_outputs, (), sent), prices


def _drawn(draw, h, name, size, reads, tag):
    """Add an op, a view, a tuple of which one member is read, or a random op; return the value to read."""
    kind = draw(st.sampled_from(["op", "op", "op", "view", "pair", "random"]))
    if kind == "view":
        h.view(name, reads[0], tag)
    elif kind == "pair":
        h.pair(name, size, size + 1, reads[0], tag=tag)
        return f"{name}_{draw(st.integers(0, 1))}"
    elif kind == "random":
        h.op(name, size, reads[0], tag=tag, target=aten.bernoulli.default)
    else:
        h.op(name, size, *reads, tag=tag)
    return name


class Parts:
    """Runs the parts of a plan with stages, each with only what it may read.

    Attributes:
        env: part -> node -> value, of the parts that have run.
        read: part -> the values that it took from elsewhere, without inputs of the model.
    """

    def __init__(self, flow, plan, primals, tangents):
        self.flow, self.plan, self.env, self.read = flow, plan, {}, {}
        given = flow.graph.find_nodes(op="placeholder")
        early = iter(primals)
        late = iter(tangents)
        self.inputs = {n: next(late) if n in flow.backward_inputs else next(early) for n in given}
        self.interpreter = fx.Interpreter(flow.root, garbage_collect_values=False)

    def run(self, key):
        """Run a part."""
        own = self.env[key] = {}
        self.read[key] = set()
        for node in self.flow.index:
            if node.op == "get_attr":
                own[node] = self.interpreter.fetch_attr(node.target)
            elif node.op not in ("placeholder", "output") and key in self.plan.places.get(self.flow.producer(node), ()):
                if node.target is getitem and node in self.flow.followers:
                    own[node] = self.value(key, node.args[0])[node.args[1]]
                    continue
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(key, n))
                own[node] = node.target(*args, **kwargs)

    def value(self, key, node):
        """The value that a part reads: its own, that of the input part, forward's, or what another stage sent."""
        if node.op == "placeholder":
            if node in self.flow.backward_inputs:
                assert stage_part(key).half != "forward"
                self.read.setdefault(key, set()).add(node)
            return self.inputs[node]
        half, stage = key
        sources = [key, ("input", stage)] if half == "weight" else [key]
        for source in sources:
            if node in self.env.get(source, {}):
                break
        else:
            source = self.plan.home(self.flow.producer(node))
            other = stage_part(source)
            assert other.half != "weight" and not (half == "forward" and other.half != "forward")
            assert other.stage <= stage if other.half == "forward" else other.stage >= stage
        if source != key:
            self.read.setdefault(key, set()).add(node)
        return self.env[source][node]

    def waiting(self, stage):
        """The values that wait for the weight part of a stage, by node."""
        late = ("weight", stage)
        return {n: self.value(late, n) for n in waiting_values(self.flow, self.plan, stage)}

    def outputs(self):
        """The outputs of the joint graph, each from its home."""
        values = self.flow.graph.output_node().args[0]
        return [self._output(v) if isinstance(v, Node) else v for v in values]

    def _output(self, node):
        if node.op == "placeholder":
            return self.inputs[node]
        home = self.plan.home(self.flow.producer(node))
        if home is PARENT:  # a sum over stages
            return node.target(*map(self._output, node.args))
        return self.env[home][node]


def run_parts(joint, plan, args, kwargs, stages=1):
    """The step of a plan from seed 0: forwards, input parts, weight parts; checks what the weight parts take."""
    flow = joint.flow
    torch.manual_seed(0)
    with torch.no_grad():
        parts = Parts(flow, plan, joint.primals(*args, **kwargs), joint.tangents())
        order = [*(("forward", s) for s in range(stages)), *(("input", s) for s in reversed(range(stages)))]
        for key in order:
            parts.run(key)
        for stage in range(stages):
            held = parts.waiting(stage)
            assert storages(held.values(), parts.inputs, flow) == waiting_bytes(flow, plan, stage)
            parts.run(("weight", stage))
            assert parts.read["weight", stage] == set(held)
    return joint.read(parts.outputs())


def storages(values, inputs, flow):
    """The bytes of the storages of real values, each once, without those of the model and its inputs."""
    given = [t for n, t in inputs.items() if n not in flow.backward_inputs]
    owned = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in values if isinstance(t, torch.Tensor)}
    return sum(nbytes for key, nbytes in found.items() if key not in owned)
