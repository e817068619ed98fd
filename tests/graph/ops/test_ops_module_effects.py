from __future__ import annotations

import pytest
import torch
from opnodes import module, names
from opwatch import Snapshot, storages
from torch import nn

from splitkit.graph.ops import effects_of, is_tuple, op_tables
from splitkit.graph.ops.facts import Effects, first_argument
from splitkit.graph.ops.tuples import module_tensors, settled_effects, stock_inside


def act(m: nn.Module, train: bool = True) -> tuple[str, str, bool, int]:
    """(writes, aliases, random, number of state tensors written)."""
    node, root = module(m.train(train))
    e = effects_of(node, root)
    assert e.known and not e.impure
    assert {id(t) for t in e.writes_state} <= {id(t) for t in e.reads_state}
    return " ".join(names(e.writes)), " ".join(names(e.aliases)), e.random, len(e.writes_state)


def test_modules() -> None:
    assert (
        act(nn.Linear(2, 2)) == act(nn.Conv2d(1, 1, 1)) == act(nn.LayerNorm(2)) == act(nn.GELU()) == ("", "", False, 0)
    )
    assert act(nn.ReLU(inplace=True)) == ("x", "x", False, 0)
    assert act(nn.Identity()) == act(nn.Flatten()) == ("", "x", False, 0)
    assert act(nn.Dropout(0.1)) == ("", "x", True, 0)
    assert act(nn.Dropout(0.0)) == ("", "x", False, 0)
    assert act(nn.RReLU())[2]
    assert act(nn.BatchNorm2d(2))[3] == 3
    assert act(nn.BatchNorm2d(2, track_running_stats=False))[3] == 0
    assert act(nn.InstanceNorm2d(2, track_running_stats=True))[3] == 3
    assert act(nn.Embedding(3, 2))[3] == 0 and act(nn.Embedding(3, 2, max_norm=1.0))[3] == 1
    assert act(nn.LSTM(2, 2, 2, dropout=0.5))[2] and not act(nn.LSTM(2, 2, 2))[2]
    assert act(nn.MultiheadAttention(4, 2, dropout=0.1))[2] and not act(nn.MultiheadAttention(4, 2))[2]
    assert act(nn.CrossEntropyLoss()) == ("", "", False, 0)
    assert act(nn.TransformerEncoderLayer(4, 2, 8))[2] and not act(nn.TransformerEncoderLayer(4, 2, 8, 0.0))[2]
    assert act(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))) == ("", "", False, 0)
    assert act(nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))) == ("x", "x", False, 0)


@pytest.mark.parametrize(
    "m",
    [
        nn.Dropout(0.1),
        nn.Dropout2d(0.1, inplace=True),
        nn.RReLU(),
        nn.BatchNorm1d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.LSTM(2, 2, 2, dropout=0.5),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_module_does_the_same_in_either_mode_for_a_part_may_be_put_into_the_other(m: nn.Module) -> None:
    node, root = module(m)
    trains, evaluates = effects_of(node, root.train()), effects_of(node, root.eval())
    assert trains == evaluates
    assert trains.random or trains.writes_state


def test_modules_that_may_do_anything() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    shaped = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    activation = nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: x)
    for m in (Own(2, 2), hooked, patched, shaped, activation, nn.Sequential(Own(2, 2))):
        node, root = module(m)
        e = effects_of(node, root)
        assert (names(e.writes), names(e.aliases), e.random, e.impure, e.known) == ({"x"}, {"x"}, True, True, False)
        assert len(e.writes_state) == len(list(m.parameters())) > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [True, False])
def test_modules_do_what_their_row_says(train: bool) -> None:
    """Every torch.nn class that can be built from small numbers, run against its prediction."""
    run = 0
    faults = []
    for name in sorted(op_tables.FRESH_MODULES | op_tables.ALIAS_MODULES | op_tables.DROPOUT_MODULES):
        for args in ((), (1,), (4,), (4, 4), (4, 4, 1)):
            for shape in ((2, 4), (2, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4, 4)):
                try:
                    m = getattr(nn, name)(*args).train(train)
                    x = torch.randn(shape)
                    held = {k: t.clone() for k, t in m.state_dict().items()}
                    before = Snapshot(x)
                    out = m(x)
                except Exception:
                    continue
                node, root = module(m)
                e = effects_of(node, root)
                state = {k for k, t in m.state_dict(keep_vars=True).items() if not torch.equal(t, held[k])}
                foretold = {k for k, t in m.state_dict(keep_vars=True).items() if any(t is w for w in e.writes_state)}
                if not e.known:
                    faults.append(f"{name} is unknown")
                if (before.written() and not e.writes) or (before.drew() and not e.random) or not state <= foretold:
                    faults.append(f"{name}{args} {shape} does more")
                if storages(out).keys() & before.held.keys() and not e.aliases:
                    faults.append(f"{name}{args} {shape} aliases")
                expected = is_tuple(node, root)
                if expected is not None and expected is not isinstance(out, (tuple, list)):
                    faults.append(f"{name}{args} tuple")
                run += 1
    assert not faults
    assert run > 200


def test_modules_whose_class_says_everything_are_what_a_closer_look_says() -> None:
    settled = set()
    for name in sorted(op_tables.FRESH_MODULES):
        for args in ((), (1,), (4,), (4, 4), (4, 4, 1)):
            for options in ({}, {"inplace": True}, {"return_indices": True}, {"max_norm": 1.0}, {"bias": False}):
                try:
                    m = getattr(nn, name)(*args, **options)
                except Exception:
                    continue
                node, root = module(m)
                effects = settled_effects(node, m)
                if effects is not None:
                    inside = stock_inside(m, [])
                    assert inside is not None
                    args_ = first_argument(node) if inside.writes else ()
                    assert inside.aliases == inside.writes
                    assert effects == Effects(args_, args_, module_tensors(m), same_sizes=True)
                    assert inside.effects == Effects(same_sizes=True)
                    assert is_tuple(node, root) is False
                    settled.add(name)
    assert len(settled) > 60
    assert {"Linear", "LayerNorm", "Conv2d", "ReLU"} <= settled


def test_modules_that_were_changed_are_looked_at_closely() -> None:
    hooked, holding, patched, parent, tied = (nn.Linear(2, 2) for _ in range(5))
    hooked.register_forward_hook(lambda *_: None)
    holding.cache = torch.ones(2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    parent.add_module("child", nn.Linear(2, 2))
    tied.bias = tied.weight
    for m in (hooked, holding, patched, parent):
        assert settled_effects(module(m)[0], m) is None
    assert len(effects_of(*module(holding)).reads_state) == 3
    effects = settled_effects(module(tied)[0], tied)
    assert effects is not None
    assert effects.reads_state == (tied.weight,)


def test_a_module_with_a_method_of_its_own_may_do_anything():
    conv = nn.Conv1d(2, 2, 1)
    node, root = module(conv)
    assert effects_of(node, root).known
    conv._conv_forward = lambda x, weight, bias: x  # what `forward` calls
    assert not effects_of(node, root).known
