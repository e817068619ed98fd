"""Sizes of a batch: cut into microbatches, or refused before anything runs with those that work."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.engine.json_fields import JsonField
from splitkit.errors import PipelineError
from splitkit.runtime.folder.load import decode_facts, encode_facts
from splitkit.runtime.ranks.microbatches import BatchSplitter, division
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.runtime.ranks.step_losses import reduced, shares_of

CPU = torch.device("cpu")


def splitter(
    model: nn.Module, count: int, dynamic: bool, named: dict[str, int | None] | None = None, **inputs: torch.Tensor
) -> BatchSplitter:
    gm = sk.capture(model, dynamic=dynamic, **inputs)
    return BatchSplitter(chain_of(sk.split(gm, sk.policies.Stages(1))), count, CPU, batch_dims=named)


def cut(of: BatchSplitter, args: list[Any], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    return of.divide(args, kwargs, None, None).inputs


def inputs(dynamic: bool = False) -> BatchSplitter:
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4), dynamic=dynamic)
    return BatchSplitter(chain_of(sk.split(gm, {"linear": 0, "tanh": 1})), 3, CPU)


class Tokens(nn.Module):
    """Rows and a length that vary, a position for each column, a table of fixed size and rows of one."""

    def forward(self, ids, labels, position, table, one):
        x = table[ids] + position.unsqueeze(-1) + one
        return (x.sum(-1) - labels).square().mean()


def tokens(rows: int, length: int, one: int = 1) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.randint(5, (rows, length)),
        "labels": torch.randn(rows, length),
        "position": torch.randn(length),
        "table": torch.randn(5, 3),
        "one": torch.randn(one, length, 3),
    }


@pytest.fixture(scope="module")
def three() -> BatchSplitter:
    return splitter(Tokens(), 3, True, {"ids": 0}, **tokens(2, 7))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_batch_is_as_many_microbatches_as_captured(dynamic):
    x = torch.randn(6, 4)
    found = [made["input"] for made in cut(inputs(dynamic), [x], {})]
    assert torch.equal(torch.cat(found), x) and [len(t) for t in found] == [2, 2, 2]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_microbatches_lie_in_memory_as_captured(memory_format, given):
    gm = sk.capture(nn.Conv2d(2, 3, 1), torch.randn(2, 2, 4, 5).to(memory_format=memory_format))
    chain = chain_of(sk.split(gm, sk.policies.Stages(1)))
    facts = decode_facts(JsonField("facts", "", json.loads(json.dumps(encode_facts(chain)))))
    for known in (chain.facts, facts):
        of = BatchSplitter(replace(chain, facts=known), 3, CPU)
        for x in (torch.randn(6, 2, 4, 5), torch.randn(4, 5, 2, 6).permute(3, 2, 0, 1)):
            call = {"microbatches": [{"input": part} for part in x.split(2)]} if given else {"input": x}
            made = [own["input"] for own in cut(of, [], call)]
            assert torch.equal(torch.cat(made), x)
            assert all(part.is_contiguous(memory_format=memory_format) for part in made)


class Triples(nn.Module):
    """Export gives the three kinds of positions a symbol of their own, as if they were rows."""

    def forward(self, ids, positions):
        return ids + positions[0] * positions[1] - positions[2]


def test_rows_of_which_there_are_too_few_to_be_the_batch_are_named_as_one_of_several_dimensions():
    triples = {"ids": torch.ones(4, 7), "positions": torch.ones(3, 4, 7)}
    batch = {"ids": torch.randn(11, 7), "positions": torch.randn(3, 11, 7)}
    with pytest.raises(PipelineError, match="SK802: dimension 0 or 1 or 2 of positions") as error:
        cut(splitter(Triples(), 4, True, **triples), [], batch)
    assert "batch_dims={'positions': 1}" in error.value.remedy
    made = cut(splitter(Triples(), 4, True, {"positions": 1}, **triples), [], batch)
    assert torch.equal(torch.cat([own["positions"] for own in made], 1), batch["positions"])


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_last_microbatch_of_another_size_is_refused_with_the_sizes_that_work(rows):
    with pytest.raises(PipelineError, match=rf"SK802: input is float32\[{rows}, 4\]") as error:
        cut(inputs(), [torch.randn(rows, 4)], {})
    assert error.value.remedy.startswith("Give float32[6, 4]: 3 microbatches of [2, 4] in dimension 0 (if another")
    assert "dynamic=True" in error.value.remedy and "drop_last=True" in error.value.remedy


@pytest.mark.parametrize(("rows", "each"), [(7, [3, 2, 2]), (8, [3, 3, 2]), (9, [3, 3, 3]), (15, [5, 5, 5])])
def test_symbolic_rows_are_shared_out_evenly_and_weighted(rows, each):
    x, of = torch.randn(rows, 4), inputs(dynamic=True)
    made = cut(of, [x], {})
    assert torch.equal(torch.cat([m["input"] for m in made]), x) and [len(m["input"]) for m in made] == each
    sizes = of.divide([x], {}, None, "mean").sizes
    assert sizes.shares == tuple(Fraction(n, rows) for n in each)
    losses = torch.stack([m["input"].sum(1).mean() for m in made])
    assert torch.allclose(reduced(losses, sizes.shares), x.sum(1).mean())


def test_other_inputs_than_rows_go_to_each_microbatch(three):
    batch = tokens(8, 11)
    made = cut(three, [], batch)
    assert [m["ids"].shape for m in made] == [(3, 11), (3, 11), (2, 11)]
    assert torch.equal(torch.cat([m["labels"] for m in made]), batch["labels"])
    assert all(torch.equal(m[name], batch[name]) for m in made for name in ("position", "table", "one"))
    rows = cut(three, [], tokens(9, 11, one=3))
    assert [m["one"].shape for m in rows] == [(1, 11, 3)] * 3


def test_a_batch_as_small_as_a_microbatch_is_shared_out_too(three):
    """Where sizes are fixed, it goes to each of them."""
    two = splitter(Tokens(), 2, True, {"ids": 0}, **tokens(4, 7))
    assert [len(m["ids"]) for m in cut(two, [], tokens(4, 7))] == [2, 2]
    with pytest.raises(PipelineError, match="SK802: ids has 2 rows for 3 microbatches") as error:
        cut(three, [], tokens(2, 7))
    assert "Give 3 rows or more" in error.value.remedy and "drop_last" in error.value.remedy


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.randn(7, 7)}, "different numbers of rows: ids 8, labels 7"),
        ({"ids": tokens(6, 7)["ids"], "labels": torch.randn(2, 7)}, "different numbers of rows: ids 6, labels 2"),
        ({"labels": torch.randn(8, 6)}, r"labels.*\[8, 6\]"),
        ({"position": torch.randn(9)}, r"position is float32\[9\]"),
        ({"table": torch.randn(6, 3)}, "different numbers of rows: ids 8, labels 8, table 6"),
        ({"ids": torch.randn(8, 7)}, r"ids is float32\[8, 7\]"),
        ({"ids": None}, "ids is a NoneType"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(three, change, says):
    with pytest.raises(PipelineError, match=f"SK802: .*{says}"):
        three.divide([], tokens(8, 7) | change, None, None)


def test_sizes_that_the_graph_does_not_allow_are_refused(three):
    """Export fixes what differs for 0 and 1, so a microbatch has two rows or more."""
    with pytest.raises(PipelineError, match=r"SK802: ids\.shape\[0\] is 1 in a microbatch") as error:
        three.divide([], tokens(5, 7), None, None)
    assert "Give 2 rows or more for each microbatch" in error.value.remedy
    halves = splitter(Halves(), 2, True, {"x": 0}, x=torch.randn(2, 8))
    assert [m["x"].shape for m in cut(halves, [], {"x": torch.randn(6, 12)})] == [(3, 12)] * 2
    for length in (11, 34):
        with pytest.raises(PipelineError, match=r"SK802: .*x\.shape\[1\]"):
            halves.divide([], {"x": torch.randn(4, length)}, None, None)


class Halves(nn.Module):
    """An even length of at most 32."""

    def forward(self, x):
        torch._check(x.shape[1] <= 32)
        return x.view(x.shape[0], -1, 2).sum()


def test_microbatches_may_be_given_with_sizes_of_their_own(three):
    given = [tokens(2, 5), tokens(4, 9), tokens(3, 5)]
    made = three.given(given)
    assert all(torch.equal(m[name], g[name]) for m, g in zip(made, given, strict=True) for name in g)
    assert three.divide([], {"microbatches": given}, None, "mean").sizes.shares == tuple(
        Fraction(n, 9) for n in (2, 4, 3)
    )
    with pytest.raises(PipelineError, match="SK802: 2 microbatches are given, and a step has 3"):
        three.given(given[:2])
    with pytest.raises(PipelineError, match="SK802: 4 microbatches are given, and a step has 3"):
        three.given([*given, given[0]])
    with pytest.raises(PipelineError, match=r"SK802: labels is \[2, 6\] in a microbatch"):
        wrong = [*given[:2], tokens(2, 5) | {"labels": torch.randn(2, 6)}]
        three.divide([], {"microbatches": wrong}, None, None)
    fixed = inputs()
    assert len(fixed.given([{"input": torch.randn(2, 4)}] * 3)) == 3
    with pytest.raises(PipelineError, match=r"SK802: input is float32\[3, 4\]"):
        fixed.given([{"input": torch.randn(3, 4)}] * 3)


def test_a_target_is_cut_like_the_rows():
    assert inputs().targets(torch.arange(6), (2, 2, 2))[1].tolist() == [2, 3]
    assert [len(t) for t in inputs(True).targets(torch.arange(14), (3, 2, 2))] == [6, 4, 4]
    with pytest.raises(PipelineError, match="SK802: the target has 5 rows for 3 microbatches") as error:
        inputs().targets(torch.arange(5), (2, 2, 2))
    assert "multiple of 3" in error.value.remedy
    with pytest.raises(PipelineError, match="SK802: the target has 6 rows for 3 microbatches of 3, 2, 2 rows"):
        inputs(True).targets(torch.arange(6), (3, 2, 2))
    assert inputs().given_targets([1, 2, 3]) == [1, 2, 3] and inputs().given_targets(None) == [None] * 3
    with pytest.raises(PipelineError, match="SK802: 2 targets for 3 microbatches"):
        inputs().given_targets([1, 2])


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x.sin() if mask is None else x.sin() * mask


def test_a_whole_batch_has_every_input_that_the_graph_has():
    x = torch.randn(4, 3)
    chain = chain_of(sk.split(sk.capture(Masked(), x[:2], None), sk.policies.Stages(1)))
    of = BatchSplitter(chain, 2, CPU)
    assert of.divide([x, None], {}, None, None).whole == {"x": x, "mask": None}
    assert of.divide([], {"x": x, "mask": None}, None, None).whole == {"x": x, "mask": None}
    halves = [{"x": half, "mask": None} for half in x.split(2)]
    found = of.divide([], {"microbatches": halves}, None, None).whole
    assert found["mask"] == [None, None] and torch.equal(torch.cat(found["x"]), x)
    unread = BatchSplitter(chain, 2, CPU, needed=())
    assert unread.divide([], {}, None, None).whole == {} and cut(unread, [], {}) == [{"x": None, "mask": None}] * 2


@pytest.mark.parametrize(
    ("captured", "given", "named", "dims", "unfit"),
    [
        ({"x": [2, 5]}, {"x": [8, 5]}, {}, {"x": 0}, {}),
        ({"x": [1, 5]}, {"x": [4, 5]}, {}, {"x": 0}, {}),
        ({"x": [2, 5]}, {"x": [2, 5]}, {}, {}, {}),
        ({"x": [2, 5]}, {"x": [8, 20]}, {}, {}, {"x": None}),
        ({"x": [2, 5]}, {"x": [2, 20]}, {}, {}, {"x": 1}),  # a batch in dimension 1, or a longer sequence
        ({"x": [5, 2]}, {"x": [5, 8]}, {"x": 1}, {"x": 1}, {}),
        ({"x": [5, 2]}, {"x": [20, 2]}, {"x": 1}, {}, {"x": None}),
        ({"x": [5, 2]}, {"x": [5, 2]}, {"x": 1}, {}, {"x": None}),
        ({"x": [2, 5], "table": [2]}, {"x": [8, 5], "table": [8]}, {"table": None}, {"x": 0}, {"table": None}),
        ({"ids": [2, 5], "p": [3, 2, 5]}, {"ids": [8, 5], "p": [3, 8, 5]}, {}, {"ids": 0, "p": 1}, {}),
        ({"ids": [2, 5], "p": [3, 2, 5]}, {"ids": [8, 5], "p": [3, 2, 20]}, {}, {"ids": 0, "p": 2}, {"p": 2}),
        ({"ids": [2, 5], "p": [5]}, {"ids": [2, 20], "p": [20]}, {}, {"ids": 1, "p": 0}, {"ids": 1}),
        ({"x": [5, 2, 3], "y": [2]}, {"x": [5, 8, 3], "y": [8]}, {"x": 1}, {"x": 1, "y": 0}, {}),
        ({"x": [2, 5], "mask": [5, 5]}, {"x": [8, 5], "mask": [5, 5]}, {}, {"x": 0}, {}),
    ],
)
def test_an_input_is_divided_where_it_is_as_large_as_all_microbatches(captured, given, named, dims, unfit):
    found = division(given, {name: [shape] * 4 for name, shape in captured.items()}, named)
    assert (found.dims, found.unfit) == (dims, unfit) or (unfit and found.unfit == unfit)


class Mask(nn.Module):
    """A sequence-first model with attention's mask ``[length, length]``, and one of rows ``[rows, length]``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, mask, padding=None):
        rows = self.layer(x).transpose(0, 1)
        y = (rows @ rows.transpose(1, 2) + mask) @ rows
        return y.sum() if padding is None else (y * padding.unsqueeze(-1)).sum()


def sequences(rows: int, length: int, *, padding: bool = False) -> dict[str, torch.Tensor]:
    more = {"padding": torch.randn(rows, length)} if padding else {}
    return {"x": torch.randn(length, rows, 3), "mask": torch.randn(length, length)} | more


def test_attention_tells_which_dimension_is_the_sequence():
    made = splitter(Mask(), 3, True, **sequences(2, 5, padding=True))
    assert [m["x"].shape[1] for m in cut(made, [], sequences(8, 7, padding=True))] == [3, 3, 2]
    alone = splitter(Mask(), 3, True, **sequences(2, 5))
    for rows, length in ((6, 5), (8, 7), (2, 5)):
        with pytest.raises(PipelineError, match=r"SK802: .*dimension"):
            alone.divide([], sequences(rows, length), None, None)
    named = splitter(Mask(), 3, True, {"x": 1}, **sequences(2, 5))
    assert [m["x"].shape[1] for m in cut(named, [], sequences(8, 7))] == [3, 3, 2]


class Causal(nn.Module):
    """Attention without a mask of its own: no value of the graph has the length twice."""

    def __init__(self):
        super().__init__()
        self.table, self.heads = nn.Embedding(9, 8), 2

    def forward(self, ids):
        x = self.table(ids).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


def test_the_scores_inside_an_attention_op_tell_it_too():
    made = splitter(Causal(), 3, True, ids=torch.ones(2, 5, dtype=torch.int64))
    found = cut(made, [], {"ids": torch.ones(8, 7, dtype=torch.int64)})
    assert [tuple(m["ids"].shape) for m in found] == [(3, 7), (3, 7), (2, 7)]


class Constant(nn.Module):
    def forward(self, x, factor, mask=None):
        return x.sin() * factor if mask is None else x * mask


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch):
        x = self.b(self.a(batch["x"]).tanh())
        return (x - batch["y"]).square().mean()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dict_of_inputs_is_divided_on_ranks_that_read_some_of_them(dynamic):
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    gm = sk.capture(Nested(), {name: value[:2] for name, value in batch.items()}, dynamic=dynamic)
    chain = chain_of(sk.split(gm, sk.policies.Stages(2)))
    for needed in ({"batch_x"}, {"batch_y"}, None):
        found = cut(BatchSplitter(chain, 4, CPU, needed), [batch], {})
        for i, one in enumerate(found):
            for name, value in batch.items():
                if needed is None or f"batch_{name}" in needed:
                    assert torch.equal(one[f"batch_{name}"], value[2 * i : 2 * i + 2])


def test_other_numbers_than_at_capture_are_refused():
    x = torch.randn(4, 3)
    chain = chain_of(sk.split(sk.capture(Constant(), x[:2], 2.0, None), sk.policies.Stages(1)))
    decoded = decode_facts(JsonField("facts", "", json.loads(json.dumps(encode_facts(chain)))))
    assert decoded.constants == chain.facts.constants == {"factor": 2.0, "mask": None}
    of = BatchSplitter(chain, 2, CPU)
    assert len(cut(of, [x, 2.0, None], {})) == 2
    for wrong in ([x, 3.0, None], [x, 2, None], [x, 2.0, x]):
        with pytest.raises(PipelineError, match=r"SK802: (factor|mask) is .*captured with (2\.0|None)"):
            of.divide(wrong, {}, None, None)


def test_weights_of_a_reduction():
    losses = torch.tensor([1.0, 2.0, float("nan"), 4.0])
    shares = shares_of(lambda inputs: inputs["n"], (1, 1, 1, 1), [{"n": torch.tensor(n)} for n in (1, 2, 0, 5)])
    assert reduced(losses, shares).item() == pytest.approx((1 + 4 + 20) / 8)
    assert reduced(losses, shares_of(lambda inputs: 0, (1,) * 4, [{}] * 4)).isnan()  # as the mean of nothing
    assert (
        reduced(losses[:2], shares_of("sum", (1, 3), [])) == 3
        and reduced(losses[:2], shares_of("mean", (1, 3), [])) == 1.75
    )
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(PipelineError, match="SK802: the weight of microbatch 0 is"):
            shares_of(lambda inputs, wrong=wrong: wrong, (1,), [{}])
