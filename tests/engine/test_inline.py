"""`inline`: the original comes back, with what was done to the parts. That nothing changes else is in `test_laws`."""

from __future__ import annotations

import copy
import operator
import random
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from campaigns import these_first
from fuzzing import usable_inputs
from handgraphs import graph_of
from opaquecode import close_all
from randomgraphs import random_graph, random_plan
from splitlaws import assert_inlines
from torch import fx, nn
from visiblestate import observe
from zoographs import specimens

import splitkit as sk
from splitkit import _torch
from splitkit.costs import unit
from splitkit.engine.inline import inline
from splitkit.engine.split import split
from splitkit.errors import GraphError, PlanError
from splitkit.graph.dataflow import analyze
from splitkit.graph.scope import is_state_op
from splitkit.plans.parts import Part
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune, rematerialize
from splitkit.policies import RoundRobin, Stages
from splitkit.testing import assert_same

ZOO = specimens()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        a = torch.relu(x + self.shift)
        b = torch.relu(a * self.inner.scale)
        return torch.sin(b) - a


def structure(gm):
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in gm.graph.nodes]


def gelu_for_relu(gm):
    """What a pass does, on a whole or on a part."""
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(F.gelu, node.args)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
    gm.recompile()


@pytest.fixture
def whole():
    return fx.symbolic_trace(Model())


X = torch.tensor([[-1.0, 0.5, 2.0, -3.0]])


@pytest.mark.parametrize("parameters", ["own", "hoist"])
@pytest.mark.parametrize("policy", [Stages(3), RoundRobin(2), lambda node: 0])
def test_a_pass_on_the_parts_is_a_pass_on_the_whole(whole, policy, parameters):
    made = split(whole, policy, costs=unit(whole), parameters=parameters)
    for part in made.parts.values():
        gelu_for_relu(part)
    inlined = inline(made)
    gelu_for_relu(whole)
    # Names of new nodes are those of the parts, where there is one of each.
    assert [n.target for n in inlined.graph.nodes] == [n.target for n in whole.graph.nodes]
    assert torch.equal(inlined(X), whole(X)) and torch.equal(inlined(X), made(X))
    inlined.graph.lint()


def test_a_changed_node_stays_where_it_was(whole):
    made = split(whole, Stages(3), costs=unit(whole))
    for gm in (whole, *made.parts.values()):
        for node in gm.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
        gm.recompile()
    assert structure(inline(made)) == structure(whole)


def test_added_nodes_follow_the_one_before_them(whole):
    made = split(whole, {n.name: int(n.name.startswith("r")) for n in whole.graph.nodes}, on_cycle="refine")
    for part in (whole, *made.parts.values()):
        for node in [n for n in part.graph.nodes if n.target is operator.mul]:
            with part.graph.inserting_after(node):
                new = part.graph.call_function(torch.neg, (node,))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        part.recompile()
    assert structure(inline(made)) == structure(whole)


def test_erased_nodes_stay_away():
    class Wasteful(nn.Module):
        def forward(self, x):
            dead = x.cos()  # noqa: F841
            return x.sin().tan()

    gm = fx.symbolic_trace(Wasteful())
    made = split(gm, RoundRobin(2), costs=unit(gm))
    for part in made.parts.values():
        for node in part.graph.find_nodes(op="call_method", target="cos"):
            part.graph.erase_node(node)
    # The parts do not give it to anybody.
    assert [n.name for n in inline(made).graph.nodes] == ["x", "sin", "tan", "output"]


def test_dropped_nodes_come_back():
    class Wasteful(nn.Module):
        def forward(self, x):
            first, second = x.chunk(2)
            dead = second.cos() + self.w  # noqa: F841
            return first.sin()

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

    gm = fx.symbolic_trace(Wasteful())
    flow = analyze(gm)
    made = split(gm, prune(flow, Plan.of(dict.fromkeys(flow.nodes, 0))))
    assert () in made.plan.values()
    assert_inlines(made)


def test_copies_become_one_and_edited_copies_stay_two(whole):
    flow = analyze(whole)
    add, relu, mul, relu_1, sin, sub = flow.nodes
    plan = rematerialize(flow, Plan.of({add: 0, relu: 0, mul: 0, relu_1: 0, sin: 0, sub: 1}), into=1)
    made = split(whole, plan)
    assert_inlines(made)
    made.copies[1][relu].target = F.gelu
    made.parts[1].recompile()
    inlined = inline(made)
    assert [n.target for n in inlined.graph.nodes].count(F.gelu) == 1
    assert len(inlined.graph.nodes) > len(whole.graph.nodes)
    assert torch.equal(inlined(X), made(X)) and not torch.equal(made(X), whole(X))


def test_checkpointed_parts_are_written_plainly(whole):
    plan = Plan.of({n: i // 2 for i, n in enumerate(analyze(whole).nodes)})
    made = split(whole, Plan(plan.places, {k: Part(k, call="checkpoint") for k in plan.parts}))
    assert "checkpoint" in made.module.code
    assert_inlines(made)


def test_the_parent_may_be_edited_too(whole):
    made = split(whole, Stages(2), costs=unit(whole))
    graph = made.module.graph
    first, second = (n for n in graph.nodes if n.op == "call_module")
    with graph.inserting_before(second):
        items = [graph.call_function(operator.getitem, (first, position)) for position in (0, -1)]
        new = graph.call_function(torch.dot, tuple(graph.call_method("flatten", (item,)) for item in items))
    graph.output_node().args = ((second, new),)
    graph.lint()
    made.module.recompile()
    assert_same(made, inline(made), X)


def test_constants_that_a_pass_has_added(whole):
    """Two parts fold something under one name: two attributes."""
    made = split(whole, Stages(2), costs=unit(whole))
    for number, part in enumerate(made.parts.values()):
        part.register_buffer("folded", torch.tensor(float(number + 1)), persistent=False)
        node = next(n for n in part.graph.nodes if n.op == "call_function")
        with part.graph.inserting_before(node):
            constant = part.graph.get_attr("folded")
        with part.graph.inserting_after(node):
            scaled = part.graph.call_function(operator.mul, (node, constant))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        part.recompile()
    inlined = inline(made)
    assert torch.equal(inlined(X), made(X))
    assert inlined.folded == 1 and inlined.folded_1 == 2
    assert list(inlined.state_dict()) == ["shift", "inner.scale"] == list(whole.state_dict())


def test_parameters_are_the_originals_and_modules_are_shared():
    gm = ZOO["tied language model"].graph
    inlined = inline(split(gm, Stages(3)))
    before, after = (dict(m.named_parameters(remove_duplicate=False)) for m in (gm, inlined))
    assert list(before) == list(after) and all(before[n] is after[n] for n in before)
    assert [n for n, _ in gm.named_children()] == [n for n, _ in inlined.named_children()]


def test_what_no_part_reads_comes_back_too(whole):
    whole.unused = nn.Module()
    whole.unused.register_buffer("b", torch.ones(1), persistent=False)
    whole.unused.p = nn.Parameter(torch.ones(1))
    inlined = inline(split(whole, Stages(2), costs=unit(whole)))
    assert list(inlined.state_dict()) == list(whole.state_dict())
    assert inlined.unused.b is whole.unused.b and inlined.unused.p is whole.unused.p


def test_nothing_else_changes(whole):
    made = split(whole, Stages(2), costs=unit(whole))
    before = [structure(m) for m in (whole, made.module, *made.parts.values())]
    inlined = inline(made)
    inlined.double()
    inlined.eval()
    inlined.graph.erase_node(inlined.graph.output_node())
    assert [structure(m) for m in (whole, made.module, *made.parts.values())] == before
    assert whole.training and whole.shift.dtype == torch.float32


def test_meta_signature_and_hooks():
    class Batch(nn.Module):
        def forward(self, batch, *, scale):
            return {"out": batch["a"].sin() * scale}

    batch, scale = {"a": torch.ones(2)}, torch.ones(2)
    gm = sk.capture(Batch(), batch, scale=scale)
    gm.meta["tag"] = "mine"
    gm.training = False
    seen = []
    gm.register_forward_hook(lambda module, args, out: seen.append(module))
    made = split(gm, RoundRobin(2), costs=unit(gm))
    made.module.meta["note"] = "later"
    inlined = inline(made)
    assert torch.equal(inlined(batch, scale=scale)["out"], gm(batch, scale=scale)["out"])
    assert seen == [gm, gm]
    assert inlined.meta == {**gm.meta, "note": "later"} and not inlined.training
    again = inline(split(made.module, RoundRobin(1), costs=unit(gm)))  # a split of a split
    assert again.meta["partition_names"] == made.module.meta["partition_names"]


def test_a_part_that_another_pass_has_built_anew(whole):
    made = split(whole, Stages(2), costs=unit(whole))
    name = made.names[1]
    setattr(made.module, name, fx.Transformer(made.parts[1]).transform())
    assert structure(inline(made)) == structure(whole)


def test_a_copied_split_is_inlined_with_its_own_parameters(whole):
    inlined = inline(copy.deepcopy(split(whole, Stages(2), costs=unit(whole))))
    assert structure(inlined) == structure(whole) and list(inlined.state_dict()) == list(whole.state_dict())
    assert inlined.inner.scale is not whole.inner.scale
    assert torch.equal(inlined(X), whole(X))


def test_parts_that_cannot_be_understood(whole):
    def made():
        return split(whole, Stages(2), costs=unit(whole))

    compiled = made()
    compiled.module.submod_0 = torch.compile(compiled.module.submod_0, backend="eager")
    with pytest.raises(GraphError, match=r"(?s)SK106: the part 'submod_0' is a OptimizedModule.*Inline before"):
        inline(compiled)
    replaced = made()
    replaced.module.submod_1 = nn.Linear(4, 4)
    with pytest.raises(GraphError, match="SK106: the part 'submod_1' is a Linear"):
        inline(replaced)
    wider = made()
    with wider.parts[0].graph.inserting_before(next(iter(wider.parts[0].graph.nodes))):
        wider.parts[0].graph.placeholder("another")
    with pytest.raises(GraphError, match="SK106: the part 'submod_0' takes 2 inputs, and is called with 1"):
        inline(wider)
    shorter = made()
    output = shorter.parts[0].graph.output_node()
    output.args = (output.args[0][:1],)
    with pytest.raises(GraphError, match="SK106: the part 'submod_0' gives 1 values, of which 1 is read"):
        inline(shorter)
    wrapped = made()
    call = next(n for n in wrapped.module.graph.nodes if n.op == "call_module")
    with wrapped.module.graph.inserting_before(call):
        body = wrapped.module.graph.get_attr("submod_0")
        wrapped.module.graph.call_function(map, (body, call.args[0]))
    with pytest.raises(GraphError, match="SK106: the part 'submod_0' is passed to a function"):
        inline(wrapped)
    exported = made()
    exported.module.submod_1 = sk.capture(nn.ReLU(), X)
    with pytest.raises(GraphError, match="SK106: the part 'submod_1' has a signature of its own"):
        inline(exported)


def regional():
    """mm and relu under autocast, sin outside."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    enter = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    y = graph.call_function(torch.relu, (graph.call_function(torch.mm, (x, x)),))
    graph.call_function(_torch.EXIT_AUTOCAST, (enter,))
    graph.output(graph.call_function(torch.sin, (y,)))
    return fx.GraphModule(nn.Module(), graph)


def test_regions_are_written_anew_where_an_edit_needs_it():
    """Added behind the region of its part, the product has to run in full precision: between mm and relu."""
    made = split(regional(), {"mm": 0, "relu": 1, "sin": 1})
    graph = made.parts[0].graph
    with graph.inserting_before(graph.output_node()):
        x = next(n for n in graph.nodes if n.op == "placeholder")
        product = graph.call_function(torch.mm, (x, x))
        graph.output_node().args = (product,)
    made.parts[0].recompile()
    inlined = inline(made)
    x = torch.randn(4, 4)
    assert made(x).dtype == torch.float32
    assert torch.equal(inlined(x), made(x)) and not torch.is_autocast_enabled("cpu")
    assert [str(n.target).count("autocast") for n in inlined.graph.nodes].count(1) == 4


def test_a_region_that_a_pass_has_changed_or_dropped():
    x = torch.randn(4, 4)
    for change in ("dtype", "drop", "wrap"):
        made = split(regional(), {"mm": 0, "relu": 1, "sin": 1})
        part = made.module if change == "wrap" else made.parts[0]
        graph = part.graph
        if change == "wrap":  # the second part's call
            call = [n for n in graph.nodes if n.op == "call_module"][1]
            with graph.inserting_before(call):
                enter = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.float16, True, None))
            with graph.inserting_after(call):
                graph.call_function(_torch.EXIT_AUTOCAST, (enter,))
        else:
            enter, end = (n for n in graph.nodes if is_state_op(n))
            if change == "dtype":
                enter.args = ("cpu", torch.float16, True, None)
            else:
                graph.erase_node(end)
                graph.erase_node(enter)
        part.recompile()
        assert torch.equal(inline(made)(x), made(x)), change


def insert(made, dice):
    """Add nodes to the parts and the parent: behind a random node for its readers, or at the end for the output."""
    for key, part in [*made.parts.items(), (sk.extend.PARENT, made.module)]:
        graph, pairs = part.graph, made.copies[key].items()
        known = [c for n, c in pairs if n.op.startswith("call_") and n not in made.flow.followers.values()]
        for _ in range(dice.randrange(3) if known else 0):
            node, at_end = dice.choice(known), dice.randrange(2)
            users = [graph.output_node()] if at_end else [u for u in node.users if not is_state_op(u)]
            with graph.inserting_before(graph.output_node()) if at_end else graph.inserting_after(node):
                new = graph.call_function(dice.choice([torch.sin, torch.neg, torch.tanh, observe]), (node,))
            for user in users:
                user.replace_input_with(node, new)
        part.recompile()


@pytest.mark.parametrize("seeds", these_first([range(14)], [range(14, 200)]), ids=str)
def test_randomly_edited_splits_run_like_their_inlining(seeds):
    """Writes, views, random numbers and regions around: what an added node may see, it must see inlined."""
    tried = 0
    for seed in seeds:
        dice = random.Random(seed)
        gm = random_graph(dice.randrange, 5 + dice.randrange(20), seed)
        inputs = usable_inputs(gm, seed)
        for _ in range(2 if inputs else 0):
            try:
                made = split(gm, random_plan(analyze(gm), dice.randrange), costs=unit(gm))
            except PlanError:
                continue
            insert(made, dice)
            try:
                with redirect_stderr(StringIO()):
                    assert_same(made, made, *inputs)
            except PlanError:  # the call gives an object where the parts stand on a tensor
                continue
            except (RuntimeError, TypeError, AttributeError):  # the edit made no sense
                close_all()
                continue
            inlined = inline(made)
            try:
                assert_same(made, inlined, *inputs, tolerance=2e-2)
            except AssertionError as error:
                error.add_note(f"seed {seed}:\n{gm.code}\n{inlined.code}")
                raise
            tried += 1
    assert tried > 0.75 * len(seeds)


def test_an_empty_graph_can_be_inlined():
    gm = graph_of(lambda g: None)
    assert not list(inline(split(gm, lambda node: 0)).graph.nodes)


def test_a_part_that_is_called_with_keywords_is_refused():
    gm = fx.symbolic_trace(Model())
    made = split(gm, RoundRobin(2), on_cycle="refine")
    call = next(n for n in made.module.graph.nodes if n.op == "call_module" and n.args)
    child = made.module.get_submodule(str(call.target))
    names = [n.name for n in child.graph.nodes if n.op == "placeholder"]
    call.args, call.kwargs = call.args[:-1], {names[-1]: call.args[-1]}
    takes = f"'{call.target}' takes {len(names)} inputs"
    with pytest.raises(GraphError, match=f"{takes}, and is called with {len(names)}"):
        sk.inline(made)
    call.args, call.kwargs = (*call.args, *call.kwargs.values()), {"more": call.args[0] if call.args else 1}
    with pytest.raises(GraphError, match=rf"{takes}, and is called with {len(names) + 1}"):
        sk.inline(made)
