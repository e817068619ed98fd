"""A plan whose parts backward runs again says so, and claims nothing."""

from __future__ import annotations

from dataclasses import replace

import splitkit as sk
from splitkit.plans.record import NOTE, checkpointed


def test_its_claim_goes_and_its_note_says_so_once(chain):
    plan = sk.plan(chain, sk.policies.Stages(2))
    again = checkpointed(plan)
    assert plan.claim is not None and again.claim is None
    assert again.note == f"{plan.note}; {NOTE}" and again.places == plan.places
    assert [part.call for part in again.parts.values()] == ["checkpoint"] * 2
    assert checkpointed(again) == again
    assert checkpointed(replace(plan, note="")).note == ""
