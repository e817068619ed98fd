"""Pieces of a prompt take about equally long: attention grows with the tokens before them."""

from __future__ import annotations

import pytest
from decoders import captured

import splitkit as sk
from splitkit.engine.json_fields import JsonField
from splitkit.runtime.folder.load import decode_facts, encode_facts
from splitkit.runtime.generation.prompt_pieces import costly_positions, piece
from splitkit.runtime.ranks.stage_chain import chain_of


def lengths(tokens, most, costly):
    found = []
    while sum(found) < tokens:
        found.append(min(piece(most, sum(found), costly), tokens - sum(found)))
    return found


@pytest.mark.parametrize("most, costly", [(512, 1664), (2048, 30_000), (64, 700)])
def test_each_piece_costs_about_what_the_first_costs(most, costly):
    found = lengths(4 * most, most, costly)
    costs = [x * (1 + (sum(found[:i]) + x / 2) / costly) for i, x in enumerate(found[:-1])]
    assert found[0] == most and sorted(found, reverse=True)[:-1] == found[:-1]
    # rounded down to a whole token
    assert all(cost <= costs[0] < cost * (1 + 2 / length) for cost, length in zip(costs, found, strict=False))


def test_a_piece_is_never_shorter_than_a_quarter_or_longer_than_the_first():
    assert lengths(1000, 100, 10)[-2:-1] == [25] and {*lengths(7, 1, 10)} == {1}
    assert lengths(1000, 300, None) == [300, 300, 300, 100]


def test_the_cost_of_attention_is_read_off_the_graph():
    """Two layers, 32 wide: 2 x 7680 weights a token, and 2 x 2 x 32 products and sums for each position."""
    found = costly_positions(captured("llama"))
    assert 2 * 2 * 7680 / (2 * 2 * 2 * 32) < found < 1.3 * 2 * 2 * 7680 / (2 * 2 * 2 * 32)
    assert costly_positions(captured("mamba")) is None, "nothing grows"


def test_a_folder_of_stages_knows_it():
    chain = chain_of(sk.split(captured("llama"), sk.policies.Stages(2)))
    assert chain.facts.costly == costly_positions(captured("llama"))
    data = encode_facts(chain)
    assert decode_facts(JsonField("manifest", "facts", data)).costly == chain.facts.costly
