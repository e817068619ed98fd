"""What vLLM and SGLang read of their environment variable."""

from __future__ import annotations

import os
import re

import pytest
from decodermodels import Decoder, captured, ids, stages
from partitioners import get_pp_indices

import splitkit as sk


@pytest.fixture(scope="module")
def split():
    gm, _ = captured(Decoder(5), ids())
    return sk.split(gm, stages(gm, "layers.2", "layers.3"))


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_each_rank_has_the_layers_of_its_stage(split, to):
    text = sk.export(split, to=to).text
    variable = re.search(r'export (\w+)="([0-9,]+)"', text)
    assert variable[1] == f"{to.upper()}_PP_LAYER_PARTITION"
    spans = [get_pp_indices(5, rank, 3, variable[2]) for rank in range(3)]
    homes = split.plan
    for rank, (start, end) in enumerate(spans):
        own = {node for node in split.flow.nodes if f"layers.{start}" in str(node.meta["nn_module_stack"])}
        assert {homes.home(node) for node in own} == {rank} and end > start
    assert spans[-1][1] == 5


def test_the_shell_sets_it(split):
    """As a user pastes it."""
    import subprocess

    text = sk.export(split, to="vllm").text
    shown = subprocess.run(
        ["sh", "-c", text + "echo $VLLM_PP_LAYER_PARTITION"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert shown.stdout == "2,1,2\n"
