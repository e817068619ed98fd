"""The file of measured costs: whole or ignored, shared by processes, and no key means two ops."""

import copy
import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from handgraphs import captured
from torch import fx, nn

from splitkit import costs
from splitkit.costs.timing.cache import CostCache, default_path, environment, read_cost_file
from splitkit.costs.timing.call_timing import Record
from splitkit.costs.timing.op_keys import is_lasting, key_of
from splitkit.errors import FileError

HERE = "torch 2, a machine"


def saved(path, key="mm(float32[2,3])"):
    cache = CostCache(path, HERE)
    cache.put(key, Record(1.5e-6, 64))
    cache.save()
    return path


def test_records_come_back(tmp_path):
    path = saved(tmp_path / "new" / "folder" / "costs.json")
    again = CostCache(path, HERE)
    assert again.get("mm(float32[2,3])") == Record(1.5e-6, 64) and again.get("other") is None
    assert CostCache(path, "another machine").get("mm(float32[2,3])") is None
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]  # nothing temporary stays


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = CostCache(None, HERE)
    cache.put("a", Record(1.0, 0))
    cache.save()
    assert cache.get("a") == Record(1.0, 0) and not list(tmp_path.iterdir())


def test_writers_keep_what_others_wrote_meanwhile(tmp_path):
    path = tmp_path / "costs.json"
    first, second = CostCache(path, HERE), CostCache(path, "there")
    first.put("a", Record(1.0, 0))
    second.put("b", Record(2.0, 0))
    first.save()
    second.save()
    assert read_cost_file(path) == {HERE: {"a": Record(1.0, 0)}, "there": {"b": Record(2.0, 0)}}


def test_writers_at_once_leave_a_whole_file(tmp_path):
    path = tmp_path / "costs.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: saved(path, f"op{i}"), range(40)))
    assert read_cost_file(path)[HERE]
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


GOOD = {"splitkit_cost_cache": 1, "environments": {}}
BAD = {
    "empty": b"",
    "cut short": b'{"splitkit_cost_cache": 1, "environments": {"a": {"mm": [1e-6',
    "binary": bytes(range(256)),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",
    "foreign JSON": b'{"name": "splitkit", "version": 1}',
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "of another schema": json.dumps({**GOOD, "splitkit_cost_cache": 2}).encode(),
    "of another shape": json.dumps({**GOOD, "environments": {"a": [1]}}).encode(),
    "negative": json.dumps({**GOOD, "environments": {"a": {"mm": [-1.0, 0]}}}).encode(),
    "not a number": b'{"splitkit_cost_cache": 1, "environments": {"a": {"mm": [NaN, 0]}}}',
    "text": json.dumps({**GOOD, "environments": {"a": {"mm": ["1", 0]}}}).encode(),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning_and_rewritten(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="costs.json is not a cost cache") as caught:
        cache = CostCache(path, HERE)
        cache.put("mm", Record(1.0, 0))
        cache.save()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CostCache(path, HERE).get("mm") == Record(1.0, 0)


def test_a_damaged_file_is_rewritten_even_if_nothing_is_new(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("{")
    with pytest.warns(UserWarning):
        CostCache(path, HERE).save()
    assert read_cost_file(path) == {HERE: {}}


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(FileError, match=r"SK504: cannot read .*\n.*cache=False"):
        CostCache(tmp_path, HERE)


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "costs.json", HERE)
    cache.put("mm", Record(1.0, 0))
    with pytest.warns(UserWarning, match="measured costs are not kept"):
        cache.save()
    assert cache.get("mm") == Record(1.0, 0)


def test_default_path_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "splitkit" / "costs.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "splitkit" / "costs.json"


def test_the_environment_names_torch_threads_and_precision():
    before = environment(torch.device("cpu"))
    assert torch.__version__ in before and "1 threads" in before
    torch.set_float32_matmul_precision("medium")
    assert environment(torch.device("cpu")) != before
    torch.set_float32_matmul_precision("highest")


NODE = fx.Graph().call_function(torch.ops.aten.mm.default)
X = torch.ones(4, 6)


def key(*args, node=NODE, callee=None, **kwargs):
    return key_of(node, node.target if callee is None else callee, args, kwargs)


def test_keys_read_well():
    assert key(X, X.t(), alpha=1) == "aten.mm.default(float32[4,6], float32[6,4|1,6], alpha=1)"


def test_keys_tell_apart_what_changes_the_kernel():
    calls = [
        (X,), (X[:3],), (X.double(),), (X.t(),), (X, 1), (X, 1.0), (X, True), (X, "1"), (X, None), ([X],), ([X, X],),
        (X, slice(1)), (X, torch.float16), (X, torch.channels_last), (X.to_sparse(),), (nn.Linear(2, 2),),
        (nn.Linear(2, 3),), ({"a": X},), ({"b": X},), (torch.ops.aten.mm.default,), (torch.ops.aten.mm.out,),
        (torch.relu,), (torch.sin,), (saved,), (int,), (torch.ops.higher_order.cond,), (torch.ops.higher_order.scan,),
    ]  # fmt: skip
    keys = [key(*args) for args in calls]
    assert len(set(keys)) == len(calls)
    assert keys == [key(*args) for args in calls]
    with torch.autocast("cpu", torch.bfloat16):
        assert key(X) == f"{keys[0]} under autocast cpu bfloat16"
    with torch.inference_mode():
        assert key(X) == f"{keys[0]} under inference mode"
    assert key(nn.Parameter(X)) == keys[0]  # a kernel sees the same


def test_keys_of_modules():
    def module_key(module):
        return key(X, callee=module)

    assert module_key(nn.Conv2d(3, 8, 3)) == module_key(nn.Conv2d(3, 8, 3))
    others = [nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3).eval(), nn.Conv2d(3, 8, 3).half()]
    assert len({module_key(m) for m in others}) == 4
    assert all(is_lasting(module_key(m)) for m in others)

    class Local(nn.Module):
        pass

    assert not is_lasting(module_key(Local()))


def test_keys_of_graphs_are_their_code():
    def body(k):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.add, (graph.placeholder("x"), k)))
        return fx.GraphModule(nn.Module(), graph)

    assert key(body(1)) == key(body(1)) != key(body(2))
    assert is_lasting(key(body(1)))


def test_functions_without_a_name_of_their_own_do_not_last():
    graph = fx.Graph()
    first, second = (graph.call_function(f) for f in (lambda x: x, lambda x: -x))
    assert key(X, node=first) != key(X, node=second) and not is_lasting(key(X, node=first))
    assert is_lasting(key(X, node=graph.call_function(torch.relu)))
    assert key(X, node=graph.call_method("relu"), callee="relu") == "Tensor.relu(float32[4,6])"


@pytest.mark.parametrize("record", [[10**400, 0], [1.0, 10**400], [True, False]])
def test_a_cache_with_numbers_that_are_no_seconds_is_measured_anew(tmp_path, record):
    file = tmp_path / "costs.json"
    gm = captured(lambda self, x: x.sin(), torch.ones(3))
    costs.measured(gm, torch.ones(3), cache=file, min_run_time=1e-4)
    damaged = json.loads(file.read_text())
    for known in damaged["environments"].values():
        known.update(dict.fromkeys(known, record))
    file.write_text(json.dumps(damaged))
    with pytest.warns(UserWarning, match="is not a cost cache"):
        found = costs.measured(gm, torch.ones(3), cache=file, min_run_time=1e-4)
    assert sum(map(found.seconds, gm.graph.nodes)) < 0.5
    assert "[1" not in file.read_text().replace(" ", "")


def test_an_op_on_a_conjugate_has_a_key_of_its_own():
    """`conj()` leaves a bit to whoever reads the tensor, and costs that reader a pass over it."""

    def twice(self, x):
        return x @ x, x.conj() @ x

    x = torch.randn(16, 16, dtype=torch.complex64)
    gm = captured(twice, x)
    products = [n for n in gm.graph.nodes if n.target is torch.ops.aten.matmul.default]
    keys = [key_of(n, n.target, (v, x), {}) for n, v in zip(products, (x, x.conj()), strict=True)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Upsample(size=[4, 4]), nn.Upsample(size=[512, 512])),
        (nn.Unflatten(1, [2, 8]), nn.Unflatten(1, [8, 2])),
        (
            nn.TransformerEncoderLayer(16, 2, activation=torch.tanh),
            nn.TransformerEncoderLayer(16, 2, activation=F.silu),
        ),
    ],
)
def test_modules_that_differ_in_a_list_or_a_function_have_different_keys(one, other):
    def key(module):
        graph = fx.Graph()
        x = graph.placeholder("x")
        return key_of(graph.call_module("m", (x,)), module, (torch.ones(1, 16, 16),), {})

    assert key(one) != key(other)
    assert key(one) == key(copy.deepcopy(one))
    assert is_lasting(key(one))
