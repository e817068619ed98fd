"""The scans are the recurrence that defines them, for any number of tokens, and go on from the state they are given."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from splitkit._torch import FakeTensorMode
from splitkit.costs.flop_formulas import formulas_for
from splitkit.engine.function_names import function_of, name_of_function
from splitkit.graph.ops.declared import declared_facts
from splitkit.graph.ops.facts import Facts
from splitkit.graph.ops.state_scans import CHUNKED_SCAN, LIMITED_STEPS, SCANS, SELECTIVE_SCAN


def selective_inputs(tokens, sequences=2, channels=3, states=5):
    x, dt = torch.randn(sequences, channels, tokens), torch.rand(sequences, channels, tokens)
    b, c = torch.randn(2, sequences, tokens, states)
    return x, dt, -torch.rand(channels, states), b, c, torch.randn(sequences, channels, states)


def chunked_inputs(tokens, sequences=2, heads=4, channels=3, groups=2, states=5):
    x, dt = torch.randn(sequences, tokens, heads, channels), torch.rand(sequences, tokens, heads)
    b, c = torch.randn(2, sequences, tokens, groups, states)
    return x, dt, -torch.rand(heads), b, c, torch.randn(sequences, heads, channels, states)


def one_by_one(x, dt, a, b, c, state):
    """The definition, for ``x`` of ``[tokens, channels]``, ``dt`` of ``[tokens, channels]`` and one state."""
    out = []
    for t in range(len(x)):
        state = torch.exp(dt[t][:, None] * a) * state + dt[t][:, None] * x[t][:, None] * b[t]
        out.append(state @ c[t])
    return torch.stack(out), state


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_a_selective_scan_is_its_recurrence(tokens):
    x, dt, a, b, c, state = given = selective_inputs(tokens)
    out, after = SELECTIVE_SCAN(*given)
    for row in range(2):
        want, last = one_by_one(x[row].T, dt[row].T, a, b[row], c[row], state[row])
        torch.testing.assert_close(out[row], want.T)
        torch.testing.assert_close(after[row], last)


@pytest.mark.parametrize("tokens, chunk", [(1, 4), (4, 4), (7, 3), (9, 16)])
def test_a_chunked_scan_is_its_recurrence_however_it_is_divided(tokens, chunk):
    x, dt, a, b, c, state = given = chunked_inputs(tokens)
    out, after = CHUNKED_SCAN(*given, chunk)
    for row in range(2):
        for head in range(4):
            steps = dt[row, :, head, None].expand(-1, 3)
            # two heads share a group
            inputs = x[row, :, head], steps, a[head], b[row, :, head // 2], c[row, :, head // 2], state[row, head]
            want, last = one_by_one(*inputs)
            torch.testing.assert_close(out[row, :, head], want)
            torch.testing.assert_close(after[row, head], last)


def test_a_chunked_scan_stays_exact_where_the_state_fades():
    """Differences of sums over a whole chunk would lose the small terms."""
    x, dt, a, b, c, state = chunked_inputs(64)
    given = x, 40 * dt, 10 * a, b, c, state
    exact, _ = CHUNKED_SCAN(*given, 1)
    torch.testing.assert_close(CHUNKED_SCAN(*given, 64)[0], exact, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["selective", "chunked"])
def test_pieces_give_what_the_whole_gives(kind):
    given, dim, more = (selective_inputs(9), 2, ()) if kind == "selective" else (chunked_inputs(9), 1, (4,))
    scan = SELECTIVE_SCAN if kind == "selective" else CHUNKED_SCAN
    x, dt, a, b, c, state = given
    kept, want = state.clone(), scan(*given, *more)
    made, held = [], state
    for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
        pieces = [
            value.narrow(d, part.start, part.stop - part.start) for value, d in ((x, dim), (dt, dim), (b, 1), (c, 1))
        ]
        out, held = scan(pieces[0], pieces[1], a, *pieces[2:], held, *more)
        made.append(out)
    torch.testing.assert_close(torch.cat(made, dim), want[0])
    torch.testing.assert_close(held, want[1])
    assert torch.equal(state, kept), "the state that was given is left as it was"


def test_time_steps_are_limited_in_prompts_only():
    dt = torch.tensor([[[1e-4], [0.5], [9.0]]])
    assert LIMITED_STEPS(dt, 0.001, 2.0, 4).flatten().tolist() == pytest.approx([0.001, 0.5, 2.0])
    assert LIMITED_STEPS(dt[:, :1], 0.001, 2.0, 0).item() == pytest.approx(0.001)
    assert torch.equal(LIMITED_STEPS(dt[:, :1], 0.001, 2.0, 4), dt[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_sizes_that_a_graph_expects_and_memory_of_their_own(dtype):
    calls = [(SELECTIVE_SCAN, selective_inputs(4)), (CHUNKED_SCAN, (*chunked_inputs(4), 2))]
    calls.append((LIMITED_STEPS, (torch.rand(2, 1, 3), 0.1, 1.0, 3)))
    for op, (*given, last) in calls:
        # the state keeps its dtype, as in a model of 16 bits
        args = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in given] + [last]
        real = op(*args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
        pairs = [(real, fake)] if isinstance(real, torch.Tensor) else list(zip(real, fake, strict=True))
        places = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for one, other in pairs:
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            assert one.data_ptr() not in places


def test_they_have_no_effects_that_keep_a_plan_from_moving_them():
    assert [declared_facts(op) for op in SCANS] == [Facts()] * len(SCANS)


def test_a_graph_file_may_call_them():
    for op in SCANS:
        assert function_of(name_of_function(op)) is op


def test_work_grows_with_the_tokens_and_is_counted():
    for op, made, more in ((SELECTIVE_SCAN, selective_inputs, ()), (CHUNKED_SCAN, chunked_inputs, (4,))):
        counts = []
        for tokens in (4, 8):
            given = (*made(tokens), *more)
            with FlopCounterMode(display=False, custom_mapping=formulas_for(op)) as counter:
                op(*given)
            counts.append(counter.get_total_flops())
        assert counts[1] == 2 * counts[0] > 0
