"""Modules of a part in few words."""

from __future__ import annotations

import pytest

from splitkit.view.data.report import collapse

LAYERS = [f"h.{i}.{part}" for i in range(4) for part in ("attn", "mlp")]


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn"], ["h.0-1", "h.2 (1 of 2)"]),
        (LAYERS, ["h"]),
        (["h.0.attn", "h.0.mlp", "h.2.attn", "h.2.mlp"], ["h.0", "h.2"]),
        ([*LAYERS, "", "head", "head"], ["(the whole model)"]),
        ([*LAYERS, "head"], ["h", "head (1 of 2)"]),
        (["", "h.3.attn"], ["h.3 (1 of 2)", "(top level) (1 of 1 own)"]),
        ([], []),
    ],
)
def test_whole_modules_stand_for_their_children_and_neighbours_are_ranges(here, expected):
    assert collapse(here, [*LAYERS, "head", "head", ""]) == expected


def test_layers_of_two_lists_are_no_range():
    everywhere = [f"{side}.{i}.mlp" for side in ("encoder", "decoder") for i in range(3)]
    assert collapse(everywhere[:1] + everywhere[4:], everywhere) == ["encoder.0", "decoder.1-2"]
    assert collapse([everywhere[0], everywhere[2]], everywhere) == ["encoder.0", "encoder.2"]
