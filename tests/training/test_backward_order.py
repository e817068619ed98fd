"""The order in which halves compute: legal, the same in every process, and never a higher peak than graph order."""

from __future__ import annotations

import random

import pytest
from campaigns import these_first
from jointgraphs import Hand
from jointmodels import WIDER, wide
from smallnets import NETS, loss_or_sum

from splitkit.costs import unit
from splitkit.engine.pair import divide
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.profile import simulate_memory
from splitkit.policies import RecomputeAll, Remat, SaveAll
from splitkit.testing import models
from splitkit.training.emission_order import EmissionOrder, _Half
from splitkit.training.flow import BACKWARD, FORWARD, recompute, save_all_plan, unrepeatable

PRODUCTS = ["aten.mm", "aten.addmm", "aten.bmm", "aten.convolution"]
POLICIES = {"save all": SaveAll(), "recompute all": RecomputeAll(), "keep products": Remat(PRODUCTS)}


def simulated(pair):
    return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


def in_graph_order(flow, policy, monkeypatch):
    """The pair whose halves compute in the order of the joint graph."""
    with monkeypatch.context() as patch:
        patch.setattr(EmissionOrder, "forward", lambda self, members, saved: members)
        patch.setattr(EmissionOrder, "backward", lambda self, members: members)
        return divide(flow, policy, unit(flow.root))


def computed(gm):
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def assert_legal(flow, pair):
    """Each half computes what its plan says, after all that it waits for; members of tuples with their makers."""
    for gm, key in ((pair.forward, FORWARD), (pair.backward, BACKWARD)):
        nodes = {n.name: n for n in flow.graph.nodes}
        order = [nodes[n.name] for n in computed(gm)]
        assert sorted(order) == sorted(n for n in pair.plan.members(key) if n.op != "placeholder")
        place = {n: i for i, n in enumerate(order)}
        for node in order:
            for before in (*node.all_input_nodes, *flow.after[node]):
                assert place.get(before, -1) < place[node]
        for i, node in enumerate(order):
            if node in flow.followers:
                assert flow.producer(order[i - 1]) is flow.producer(node)


@pytest.mark.parametrize(
    "name", these_first(["gpt2", "unet", "writing"], sorted({*models.NAMES, *NETS} - {"gpt2", "unet", "writing"}))
)
def test_legal_and_never_a_higher_peak_than_graph_order(name, monkeypatch):
    flow = wide(name)[0].flow
    draw = random.Random(0)
    choices = [n for n in flow.nodes if save_all_plan(flow).home(n) == FORWARD and n not in unrepeatable(flow)]
    some = recompute(flow, save_all_plan(flow), draw.sample(choices, len(choices) // 3))
    for policy in (*POLICIES.values(), some):
        pair, plain = divide(flow, policy, unit(flow.root)), in_graph_order(flow, policy, monkeypatch)
        assert_legal(flow, pair)
        assert (pair.saved, pair.sizes) == (plain.saved, plain.sizes)
        ours, theirs = simulated(pair), simulated(plain)
        assert ours.peak <= theirs.peak and ours.end == theirs.end


@pytest.mark.parametrize("name", these_first(["gpt2", "unet"], ["t5"]))
def test_the_peak_that_orders_are_chosen_by_is_the_simulated_one(name, monkeypatch):
    """Up to what is there all the time, which no order changes."""
    flow = wide(name)[0].flow
    order, rest = EmissionOrder(flow), set()
    for policy in (RecomputeAll(), Remat(PRODUCTS)):
        for pair in (divide(flow, policy, unit(flow.root)), in_graph_order(flow, policy, monkeypatch)):
            half = _Half(order, order._numbers(pair.plan.members(BACKWARD)), flow.gradients)
            nodes = {n.name: n for n in flow.graph.nodes}
            units = dict.fromkeys(order.number[nodes[n.name]] for n in computed(pair.backward))
            rest.add(simulated(pair).peak_of("backward") - half.peak(units))
    assert len(rest) == 1


def test_recompute_of_one_block_after_the_other_takes_less(monkeypatch):
    made = models.build("gpt2", **{**WIDER, "seq": 128, "vocab": 101})
    flow = capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum).flow
    ours, theirs = divide(flow, Remat(PRODUCTS), unit(flow.root)), in_graph_order(flow, Remat(PRODUCTS), monkeypatch)
    assert simulated(ours).peak_of("backward") < 0.9 * simulated(theirs).peak_of("backward")


def test_nothing_recomputed_is_in_graph_order(monkeypatch):
    flow = wide("lstm")[0].flow
    ours, theirs = divide(flow, SaveAll(), unit(flow.root)), in_graph_order(flow, SaveAll(), monkeypatch)
    for half in ("forward", "backward"):
        assert [n.name for n in computed(getattr(ours, half))] == [n.name for n in computed(getattr(theirs, half))]


def test_the_same_order_every_time():
    flow = wide("unet")[0].flow
    members = RecomputeAll().assign(flow, unit(flow.root)).members(BACKWARD)
    orders = [EmissionOrder(flow).backward(nodes) for nodes in (members, members[::-1])]
    assert orders[0] == orders[1]


def names(nodes):
    return " ".join(n.name for n in nodes)


def halves(flow, plan):
    """The two orders of a plan, in words."""
    pair = divide(flow, plan, unit(flow.root))
    return names(computed(pair.forward)), names(computed(pair.backward))


def test_what_is_recomputed_goes_right_before_its_reader():
    """a and b are computed again from x; at once they would be alive together, and with g1."""
    h = Hand().inputs(x=1).op("a", 8, "x").op("b", 8, "x").op("loss", 1, "a", "b").gradients(t=1)
    h.back("g1", 1, "t").back("g2", 1, "g1", "b").back("g3", 1, "g2", "a")
    flow = h.flow("loss", "g3")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), ()))
    assert backward == "g1 b g2 a g3"


def test_what_backward_makes_before_any_gradient_waits_for_its_reader_too():
    """d is backward's own view of a, and stands among forward's nodes: there it would want a at once."""
    h = Hand().inputs(x=1).op("a", 8, "x").view("d", "a", tag="is_backward").op("b", 8, "x").op("loss", 1, "a", "b")
    h.gradients(t=1).back("g1", 1, "t").back("g2", 1, "g1", "b").back("g3", 1, "g2", "d")
    flow = h.flow("loss", "g3")
    assert save_all_plan(flow).home(h["d"]) == BACKWARD
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), ()))
    assert backward == "g1 b g2 a d g3"


def test_what_frees_more_than_it_takes_goes_at_once():
    """m is all that backward needs of x; g1 ... would wait for it beside all of x."""
    h = Hand().inputs(w=1).op("x", 8, "w").op("m", 2, "x").op("loss", 1, "m").gradients(t=1)
    h.back("g1", 4, "t").back("g2", 4, "g1").back("g3", 4, "g2", "m")
    flow = h.flow("loss", "g3")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), [h["x"]]))
    assert backward == "m g1 g2 g3"


def test_what_another_still_needs_is_not_freed():
    """The same, but x is needed to the end: then m comes late."""
    h = Hand().inputs(w=1).op("x", 8, "w").op("m", 2, "x").op("loss", 1, "m").gradients(t=1)
    h.back("g1", 4, "t").back("g2", 4, "g1").back("g3", 4, "g2", "m", "x")
    flow = h.flow("loss", "g3")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), [h["x"]]))
    assert backward == "g1 g2 m g3"


def test_views_and_tuples_hold_their_memory():
    """v is a view of x: as long as v is there, nothing is freed by m. p is a tuple, unpacked at once."""
    h = Hand().inputs(w=1).op("x", 8, "w").view("v", "x").op("m", 2, "x").pair("p", 2, 2, "w")
    h.op("loss", 1, "m", "v", "p_0", "p_1").gradients(t=1)
    h.back("g1", 4, "t").back("g2", 4, "g1", "p_1").back("g3", 4, "g2", "m", "v", "p_0")
    flow = h.flow("loss", "g3")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), [h["x"]]))
    assert backward == "v g1 p p_0 p_1 g2 m g3"  # a view takes nothing


def test_the_callers_outputs_are_never_freed():
    h = Hand().inputs(w=1).op("x", 8, "w").op("m", 2, "x").op("loss", 1, "m").gradients(t=1)
    h.back("g1", 4, "t").back("g2", 4, "g1").back("g3", 4, "g2", "m")
    flow = h.flow("loss x", "g3")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), [h["x"]]))
    assert backward == "g1 g2 m g3"


def test_what_moved_into_forward_stands_behind_its_inputs(monkeypatch):
    """m is a mask that backward makes of x. In forward's place of it, behind x, it frees x before the large y."""
    h = Hand().inputs(w=1).op("x", 8, "w").op("s", 1, "x").op("y", 16, "s").op("loss", 1, "y").gradients(t=1)
    h.back("m", 1, "x").back("g", 1, "t", "m")
    flow = h.flow("loss", "g")
    moved = save_all_plan(flow).place({h["m"]: (FORWARD,)})
    assert halves(flow, moved)[0] == "x s m y loss"
    pair, plain = divide(flow, moved, unit(flow.root)), in_graph_order(flow, moved, monkeypatch)
    assert computed(plain.forward)[-1].name == "m"
    peaks = [simulated(p).peak_of("forward") >> 10 for p in (pair, plain)]
    assert peaks == [1 + 1 + 1 + 1 + 16, 8 + 1 + 1 + 1 + 16]  # t, w, s, m, y; x with them, and m only later


def test_what_grows_before_it_shrinks_stands_behind_its_inputs_too():
    """c, twice as large as x, is on the way to m."""
    h = Hand().inputs(w=1).op("x", 8, "w").op("s", 1, "x").op("y", 32, "s").op("loss", 1, "y").gradients(t=1)
    h.back("c", 16, "x").back("m", 1, "c").back("g", 1, "t", "m")
    flow = h.flow("loss", "g")
    assert halves(flow, save_all_plan(flow).place({h["c"]: (FORWARD,), h["m"]: (FORWARD,)}))[0] == "x c m s y loss"


def test_what_would_only_take_memory_stays_at_forwards_end():
    """x is saved in any case, so that m is one more."""
    h = Hand().inputs(w=1).op("x", 8, "w").op("s", 1, "x").op("y", 16, "s").op("loss", 1, "y").gradients(t=1)
    h.back("m", 4, "x").back("g", 1, "t", "m", "x")
    flow = h.flow("loss", "g")
    assert halves(flow, save_all_plan(flow).place({h["m"]: (FORWARD,)}))[0] == "x s y loss m"


def test_a_long_chain_is_no_deep_recursion():
    h = Hand().inputs(x0=1)
    for i in range(3000):
        h.op(f"x{i + 1}", 1, f"x{i}")
    h.gradients(t=1).back("g", 1, "t", "x3000")
    flow = h.flow("x3000", "g")
    _, backward = halves(flow, recompute(flow, save_all_plan(flow), ()))
    assert backward.split() == [f"x{i + 1}" for i in range(3000)] + ["g"]
