"""Values that wait for the weight part of a divided backward, and recomputed values, on graphs made by hand."""

from __future__ import annotations

from jointgraphs import Hand
from waitingvalues import waiting_bytes, waiting_values

from splitkit.plans.parts import Part
from splitkit.plans.record import Plan
from splitkit.training.stage_plan import computed_again

KIB = 1024


def planned(**places):
    """A stage whose weight part reads a gradient, a value, a view of it and a parameter."""
    h = Hand().inputs(x=1, w=1).op("f", 4, "x", "w").view("v", "f").op("out", 1, "v").gradients(t=2)
    h.back("g", 1, "t", "f").back("gw", 1, "t", "f", "v", "g", "w")
    flow = h.flow("out", "g gw")
    parts = {(half, 1): Part((half, 1)) for half in ("forward", "input", "weight")}
    usual = {"f": "forward", "v": "forward", "out": "forward", "g": "input", "gw": "weight"}
    given = {name: tuple((half, 1) for half in places.get(name, usual[name]).split()) for name in usual}
    return h, flow, Plan({h[name]: keys for name, keys in given.items()}, parts)


def test_gradients_and_saved_values_wait_and_parameters_do_not():
    h, flow, plan = planned()
    assert waiting_values(flow, plan, 1) == (h["f"], h["v"], h["t"], h["g"])
    assert waiting_bytes(flow, plan, 1) == (4 + 2 + 1) * KIB  # the view lies in the value


def test_what_the_input_part_recomputes_is_a_second_storage_unless_it_is_a_view():
    _, flow, plan = planned(f="forward input")  # the view is of the first one
    assert waiting_bytes(flow, plan, 1) == (4 + 4 + 2 + 1) * KIB
    _, flow, plan = planned(v="forward input")
    assert waiting_bytes(flow, plan, 1) == (4 + 2 + 1) * KIB
    _, flow, plan = planned(f="forward input", v="forward input")
    assert waiting_bytes(flow, plan, 1) == (4 + 2 + 1) * KIB


def test_the_weight_part_computes_its_own_copies():
    h, flow, plan = planned(f="forward weight", v="forward weight")
    assert waiting_values(flow, plan, 1) == (h["t"], h["g"])


def test_later_parts_compute_again_and_views_are_not_counted():
    h, flow, plan = planned(f="forward input weight", v="forward input", g="input weight")
    assert computed_again(flow, plan, h["f"]) == [("input", 1), ("weight", 1)]
    assert computed_again(flow, plan, h["v"]) == [] and computed_again(flow, plan, h["out"]) == []
    assert computed_again(flow, plan, h["g"]) == [("weight", 1)]
