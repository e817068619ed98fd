"""Saved values are listed with their modules and bytes."""

from __future__ import annotations

import re

from jointmodels import step_of

from splitkit.policies import Budget


def test_saved_values_name_their_module():
    joint, prices = step_of(2)
    pair = joint.split(Budget(0.9), prices)
    values = pair.saved_values
    assert {v.name for v in values} == set(pair.saved)
    assert any(re.fullmatch(r"transformer\.h\.1\.mlp\.act: \w+ \([\d.]+ \wiB\)", str(v)) for v in values)
    assert "transformer.h.0." in str(pair) and pair.plan.note in str(pair) and len(str(pair).splitlines()) < 15
    held = {n.name for n in pair.forward.graph.nodes if n.op == "placeholder"}
    assert all(v.nbytes == 0 for v in values if v.name in held)
