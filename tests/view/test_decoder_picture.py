"""The picture of a step of generation."""

from __future__ import annotations

from decoders import captured

import splitkit as sk


def test_what_nothing_trains_has_no_backward_and_no_optimizer(tmp_path):
    sk.plan(captured("llama"), sk.policies.Stages(2)).to_svg(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "forward" in text and "backward" not in text and "microbatch" not in text
