"""Seconds by the roofline: which bytes move, in which dtype a node computes, what starts no kernel."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from handgraphs import captured
from torch import nn

from splitkit import capture, costs
from splitkit.costs import Device
from splitkit.errors import CostError, GraphError

aten = torch.ops.aten
# 1 FLOP/s and 1 byte/s: seconds are FLOPs or bytes, whichever is more
UNIT = Device("unit", {"float32": 1.0}, 1.0, 1)
SLOW_MEMORY = Device("slow memory", {"float32": 1e30}, 1.0, 1)  # seconds are bytes
SLOW_UNITS = Device(  # seconds are operations, by dtype
    "slow units",
    {"float32": 1.0, "tf32": 10.0, "bfloat16": 100.0, "float8": 1000.0, "int8": 10000.0, "float64": 0.1},
    1e30,
    1,
)
LAUNCH = Device("launch", {"float32": 1e30}, 1e30, 1, launch=1.0)  # seconds are kernels


class Fn(nn.Module):
    """A function as a model, with a parameter for those that want one."""

    def __init__(self, call, *weights):
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList(nn.Parameter(w, requires_grad=w.is_floating_point()) for w in weights)

    def forward(self, *xs):
        return self.call(*xs, *self.weights)


def priced(call, *inputs, on, weights=(), how="export"):
    """(name of the op, seconds) of each node that takes time."""
    gm = capture(Fn(call, *weights), *inputs, how=how)
    prices = costs.roofline(gm, on)
    timed = [(node, prices.seconds(node)) for node in gm.graph.nodes]
    return [(str(node.target), seconds) for node, seconds in timed if seconds]


def moved(call, *inputs, weights=(), how="export"):
    """Bytes moved by the nodes of a graph together."""
    return sum(seconds for _, seconds in priced(call, *inputs, on=SLOW_MEMORY, weights=weights, how=how))


def test_the_larger_of_both_and_the_launch():
    x, w = torch.randn(2, 3), torch.randn(5, 3)
    operations, nbytes = 2 * 2 * 3 * 5, 4 * (2 * 3 + 5 * 3 + 2 * 5)
    (one,) = priced(nn.functional.linear, x, weights=[w], on=UNIT)
    assert one[1] == max(operations, nbytes) == nbytes
    (one,) = priced(nn.functional.linear, x, weights=[w], on=SLOW_UNITS)
    assert one[1] == operations
    both = Device("both", {"float32": 1.0}, 1e30, 1, launch=0.5)
    (one,) = priced(nn.functional.linear, x, weights=[w], on=both)
    assert one[1] == operations + 0.5


def test_views_no_ops_and_what_is_not_computed_take_no_time():
    def call(x):
        y = x.view(4, 2).t().unsqueeze(0).expand(3, 2, 4).to(torch.float32)
        first, second = x.unbind(0)
        return y, first[1:], second.detach(), nn.functional.dropout(x, 0.5, training=False), torch.empty(3), x.size(0)

    assert priced(call, torch.randn(2, 4), on=LAUNCH) == []


def test_state_ops_take_no_time_and_do_not_act():
    def call(x):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return x @ x

    assert [name for name, _ in priced(call, torch.randn(4, 4), on=LAUNCH)] == ["aten.matmul.default"]
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_composites_are_one_kernel():
    x = torch.randn(2, 4, 8, 16)
    attention = nn.functional.scaled_dot_product_attention
    assert priced(lambda x: attention(x, x * 1.0, x), x, on=LAUNCH) == [
        ("aten.mul.Tensor", 1.0),
        ("aten.scaled_dot_product_attention.default", 1.0),
    ]
    assert moved(lambda q, k, v: attention(q, k, v), x, x.clone(), x.clone()) == 4 * 4 * x.numel()
    assert moved(nn.functional.cross_entropy, torch.randn(8, 100), torch.zeros(8, dtype=torch.long)) == 3200 + 64 + 4
    norm = moved(lambda x, w, b: nn.functional.layer_norm(x, (16,), w, b), x, weights=[torch.ones(16), torch.ones(16)])
    assert norm == 2 * 4 * x.numel() + 2 * 64


def test_memory_that_is_read_twice_is_moved_once():
    x = torch.randn(4, 8)
    assert moved(lambda x: x * x, x) == 2 * 128
    assert moved(lambda x: x * x.view(4, 8), x) == 2 * 128
    assert moved(lambda x: x[:2] * x[2:], x) == 128 + 64
    assert moved(lambda x: x[:3] + x[1:], x) == 128 + 96  # never more than all of it
    shared = torch.randn(4, 8)
    assert moved(lambda x, a, b: torch.addcmul(x, a, b), x, weights=[shared, shared]) == 3 * 128


def test_only_the_part_of_a_memory_that_is_looked_at():
    assert moved(lambda x: x[:, :1] * 2, torch.randn(100, 100)) == 2 * 400
    assert moved(lambda x: x.expand(100, 8) + 1, torch.randn(8)) == 32 + 3200
    assert moved(lambda x: x.expand(100, 8).contiguous(), torch.randn(8)) == 32 + 3200


ROWS = torch.tensor([3, 1, 3])
TABLE = torch.randn(1000, 8)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(TABLE)

    def forward(self, rows):
        return nn.functional.embedding(rows, self.table)


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_an_embedding_reads_what_it_yields_not_its_table(how):
    taken = 3 * 8 * 4
    for model in (Lookup(), nn.Sequential(nn.Embedding(1000, 8))):
        gm = capture(model, ROWS, how=how)
        prices = costs.roofline(gm, SLOW_MEMORY)
        assert sum(map(prices.seconds, gm.graph.nodes)) == 24 + 2 * taken


@pytest.mark.parametrize(
    "call, nbytes",
    [
        (lambda i, t: t.index_select(0, i), 24 + 2 * 96),
        (lambda i, t: t[i], 24 + 2 * 96),
        (lambda i, t: t.gather(1, i.view(3, 1)), 24 + 2 * 12),
        (lambda i, t: torch.take(t, i), 24 + 2 * 12),
        # rows, offsets; the rows of the table; the sum; what backward wants: a number for each row, two for each bag
        (lambda i, t: nn.functional.embedding_bag(i.view(1, 3), t), 24 + 8 + 96 + 32 + 40),
    ],
    ids=["index_select", "index", "gather", "take", "embedding_bag"],
)
def test_gathers_read_what_they_need(call, nbytes):
    got = priced(call, ROWS, weights=[TABLE], on=SLOW_MEMORY)
    assert max(seconds for _, seconds in got) == nbytes


def test_scatters_in_place_touch_what_they_are_given():
    def call(cache, rows, at):
        return cache.index_copy_(0, at, rows)

    assert moved(call, torch.zeros(1000, 8), torch.randn(3, 8), ROWS) == 24 + 96 + 96
    whole = moved(lambda cache, rows, at: cache.index_copy(0, at, rows), torch.zeros(1000, 8), torch.randn(3, 8), ROWS)
    assert whole >= 2 * 32000


def test_what_is_overwritten_or_only_has_the_shape_is_not_read():
    x = torch.randn(4, 8)
    assert moved(lambda x: torch.zeros_like(x), x) == 128
    assert moved(lambda x: x.new_ones(4, 8), x) == 128
    assert moved(lambda x, y: y.clone().copy_(x), x, x.clone()) == 256 + 256
    assert moved(lambda x: x.clone().add_(1), x) == 256 + 256


@pytest.mark.parametrize(
    "dtype, rate",
    [
        (torch.float32, 1.0), (torch.bfloat16, 100.0), (torch.float16, 1.0), (torch.float64, 0.1),
        (torch.complex64, 0.25), (torch.complex128, 0.025), (torch.int64, 1.0),
    ],
)  # fmt: skip
def test_products_run_at_the_peak_of_their_dtype(dtype, rate):
    x = torch.ones(4, 4, dtype=dtype)
    (one,) = priced(lambda x: x @ x, x, on=SLOW_UNITS)
    assert one[1] == pytest.approx(2 * 64 / rate)


def test_integer_products_and_tf32():
    x = torch.ones(32, 32, dtype=torch.int8)
    (one,) = priced(lambda x: torch._int_mm(x, x), x, on=SLOW_UNITS)
    assert one[1] == pytest.approx(2 * 32**3 / 10000)
    gm = capture(nn.Linear(4, 4), torch.randn(4, 4))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert costs.roofline(gm, SLOW_UNITS, tf32=True).seconds(node) == 128 / 10
    assert costs.roofline(gm, SLOW_UNITS).seconds(node) == 128


def test_what_is_no_product_does_not_run_on_matrix_units():
    (one,) = priced(lambda x: x + 1, torch.ones(8, dtype=torch.bfloat16), on=SLOW_UNITS)
    assert one[1] == 8
    (one,) = priced(lambda x: x + 1, torch.ones(8, dtype=torch.float64), on=SLOW_UNITS)
    assert one[1] == 80


class Cast(nn.Module):
    def __init__(self, device, **options):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.device, self.options = device, options

    def forward(self, x):
        x = self.first(x)
        with torch.autocast(self.device, **self.options):
            x = self.second(x)
            with torch.autocast(self.device, enabled=False):
                return self.third(x.float())


@pytest.mark.parametrize(
    "device, options, rates",
    [
        ("cpu", {"dtype": torch.bfloat16}, [1, 100, 1]),
        ("cpu", {}, [1, 100, 1]),
        ("cuda", {"dtype": torch.bfloat16}, [1, 1, 1]),
    ],
)
def test_products_of_autocast_regions_run_in_its_dtype(device, options, rates):
    gm = capture(Cast(device, **options), torch.randn(4, 4))
    prices = costs.roofline(gm, SLOW_UNITS)
    products = [n for n in gm.graph.nodes if n.target is aten.linear.default]
    assert [prices.seconds(n) for n in products] == [128 / rate for rate in rates]
    second = products[1]
    width = second.meta["val"].element_size()
    assert prices.moved(second) == 64 + 64 + 16 * width == 64 + 64 + (32 if device == "cpu" else 64)


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: (x + 1).relu().exp(), (x,))


def test_bodies_of_higher_order_ops_take_the_time_of_their_nodes():
    gm = capture(Branches(), torch.randn(4))
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.higher_order.cond)
    assert costs.roofline(gm, LAUNCH).seconds(node) == 3


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        from torch._higher_order_ops.map import map as over_rows

        return over_rows(lambda row, w: row @ w, x, self.weight)


def test_bodies_that_are_run_for_every_row():
    gm = capture(Steps(), torch.randn(7, 3, 4))
    node = next(n for n in gm.graph.nodes if str(n.target) == "map_impl")
    assert costs.flops(gm).counted(node) == 7 * 2 * 3 * 4 * 4
    assert costs.roofline(gm, SLOW_UNITS).seconds(node) == pytest.approx(7 * 2 * 3 * 4 * 4)


def test_symbolic_sizes_count_as_seen():
    gm = capture(nn.Linear(4, 6), torch.randn(5, 4), dynamic=True)
    prices = costs.roofline(gm, SLOW_MEMORY)
    assert sum(map(prices.seconds, gm.graph.nodes)) == 4 * (5 * 4 + 6 * 4 + 6 + 5 * 6)
    gm(torch.randn(9, 4))


def test_custom_op_without_a_formula_moves_what_it_takes_and_yields():
    @torch.library.custom_op("splitkit_test::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(torch.empty_like)
    assert moved(lambda x: torch.ops.splitkit_test.triple(x), torch.randn(8)) == 64


@pytest.mark.parametrize("name", these_first(["gpt2"], ["mixtral"]))
def test_real_models_on_every_device_of_the_table(name):
    sizes = {"layers": 1, "width": 64, "heads": 4, "vocab": 100, "batch": 2, "seq": 16}
    gm = captured_example(name, **sizes).graph
    nodes, flops = list(gm.graph.nodes), costs.flops(gm)
    counted = sum(map(flops.counted, nodes))
    for device in costs.devices().values():
        prices = costs.roofline(gm, device)
        total = sum(map(prices.seconds, nodes))
        kernels = sum(prices.seconds(n) > 0 for n in nodes)
        peak = max(device.peak.values())
        assert total >= kernels * device.launch + counted / peak > 0
        assert prices.note == f"roofline of {device.name}"
    assert all(prices.flops(n) == flops.flops(n) and prices.nbytes(n) == flops.nbytes(n) for n in nodes)
    assert all(prices.param_bytes(n) == flops.param_bytes(n) for n in nodes)


def test_what_is_refused():
    gm = capture(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(CostError, match="SK321"):
        costs.roofline(gm, "abacus")
    with pytest.raises(GraphError, match="SK102"):
        costs.roofline(torch.fx.symbolic_trace(nn.Linear(2, 2)), "a100")


def test_a_size_that_only_the_data_decides_counts_as_its_bound():
    gm = captured(lambda self, x: x[x > 0] * 2, torch.ones(64, 64))
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    (index,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    price = costs.roofline(gm, "cpu")
    bound = 64 * 64 * 4  # nonzero yields as many at most, and says so
    assert (price.nbytes(product), price.moved(product)) == (bound, 2 * bound)
    assert price.seconds(product) == 2 * bound / price.device.bandwidth + price.device.launch
    assert price.flops(index) == 64 * 64
    assert price.seconds(index) > price.device.launch


def test_ops_that_write_a_list_and_yield_nothing_cost_what_they_write():
    gm = captured(lambda self, x, y: (torch._foreach_add_([x, y], 1.0), x)[1], torch.ones(10), torch.ones(20))
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.Scalar)
    price = costs.roofline(gm, "cpu")
    assert price.flops(add) == 30
    assert price.moved(add) == 2 * 30 * 4
    assert price.seconds(add) == 2 * 30 * 4 / price.device.bandwidth + price.device.launch


def test_a_layer_that_is_called_as_a_module_reads_its_weights():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval())
    gm = capture(net, torch.randn(2, 4), how="symbolic_trace")
    prices = costs.roofline(gm, SLOW_MEMORY)
    called = {n.target: prices.moved(n) for n in gm.graph.nodes if n.op == "call_module"}
    count = net[1].num_batches_tracked.nbytes
    assert called == {"0": 4 * (2 * 4 + 8 * 4 + 8 + 2 * 8), "1": 4 * (2 * 8 + 4 * 8 + 2 * 8) + count}


def test_a_region_may_be_entered_with_keywords():
    def enter(graph, *args, **kwargs):
        return graph.call_function(torch.amp.autocast_mode._enter_autocast, args, kwargs)

    rates = []
    for args, kwargs in (
        (("cpu", torch.bfloat16, True, None), {}),
        (("cpu",), {"dtype": torch.bfloat16, "enabled": True, "cache_enabled": None}),
        (("cpu",), {"dtype": torch.bfloat16, "enabled": False, "cache_enabled": None}),
    ):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.randn(4, 4)
        region = enter(graph, *args, **kwargs)
        product = graph.call_function(aten.mm.default, (x, x))
        product.meta["val"] = torch.randn(4, 4)
        graph.call_function(torch.amp.autocast_mode._exit_autocast, (region,))
        graph.output(product)
        gm = torch.fx.GraphModule(nn.Module(), graph)
        rates.append(128 / costs.roofline(gm, SLOW_UNITS).seconds(product))
    assert rates == [100, 100, 1]
