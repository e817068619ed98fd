"""``splitkit plan`` for devices, memory, links and a schedule."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from capturedmodels import captured_example

import splitkit as sk
from splitkit import cli
from splitkit.cli.commands.plan_devices import _ordered
from splitkit.cli.common import check_costs, kind_of_costs
from splitkit.cli.parser import make_parser
from splitkit.cli.syntax import device_list
from splitkit.errors import CostError, FileError, UsageError
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.synthesize import load_order
from splitkit.testing import models

ROOT = Path(sk.__file__).parent.parent
SIZE = ["--size", "layers=1,width=64,heads=2", "--size", "vocab=512,seq=16"]
GPT2 = ["plan", "gpt2", *SIZE]
TINY = f"{Path(__file__).parent / 'tinynet.py'}:net"
PLAN = ["plan", TINY]

DEVICES = """
links = "ethernet100"

[fast]
count = 3
peak = { float32 = 40e12 }
bandwidth = 900e9
memory = 48_000_000_000

[slow]
peak = { float32 = 4e12 }
bandwidth = 100e9
memory = 16_000_000_000
"""


@pytest.fixture(scope="module")
def graph():
    return captured_example("gpt2", layers=1, width=64, heads=2, vocab=512, seq=16).graph


@pytest.fixture
def described(tmp_path):
    """Write a file of devices; its path."""

    def write(text=DEVICES):
        path = tmp_path / "devices.toml"
        path.write_text(text)
        return path

    return write


def failing(found):
    error = found.pop("error")
    assert not found
    return error


# ---- lists of devices


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4xh200", [("h200", 4)]),
        ("h200,h200,a100", [("h200", 1), ("h200", 1), ("a100", 1)]),
        ("2xh200, cpu", [("h200", 2), ("cpu", 1)]),
        ("2xRTX4090", [("RTX4090", 2)]),
    ],
)
def test_lists_of_devices(text, expected):
    assert device_list.device_counts(text) == expected


@pytest.mark.parametrize("text", ["", ",", "h200,", "0xh200", "1025xh200", "600xa100,600xcpu", "a.toml,h200", "4"])
def test_bad_lists_of_devices(text):
    with pytest.raises(UsageError, match="--devices"):
        device_list.device_counts(text)


@pytest.mark.parametrize(
    ("text", "advised"),
    [
        ("h200x99999999", "1024xh200"),
        ("h200x0", "1xh200"),
        ("h200*2", "2xh200"),
        ("99999999", "1024xh200"),
        ("3", "3xh200"),
    ],
)
def test_what_a_bad_list_advises_is_accepted(text, advised):
    with pytest.raises(UsageError) as refused:
        device_list.device_counts(text)
    assert re.search(r"\d+xh200", refused.value.remedy)[0] == advised
    assert device_list.device_counts(advised) == [("h200", int(advised.removesuffix("xh200")))]


def test_devices_of_a_name_and_of_a_file(described):
    found = device_list.read_device_list("2xRTX4090,cpu")
    assert [d.name for d in found.devices] == ["rtx-4090", "rtx-4090", "cpu"]
    assert not found.alike and found.links is None and str(found) == "2 x rtx-4090, 1 x cpu"
    found = device_list.read_device_list(str(described()))
    assert [d.name for d in found.devices] == ["fast"] * 3 + ["slow"]
    assert found.links == "ethernet100" and found.devices[0].memory == 48_000_000_000
    one = DEVICES[: DEVICES.index("[slow]")].replace("count = 3", "").replace("links", "# links")
    found = device_list.read_device_list(str(described(one)))
    assert len(found.devices) == 1 and found.links is None


@pytest.mark.parametrize(
    "text, links",
    [
        ("a100", "nvlink3"),
        ("2xh200,h100", "nvlink4"),
        ("4xl4", "pcie4"),
        ("2xcpu", "shared-memory"),
        ("h200,a100", "pcie4"),
        ("h200,cpu", "pcie4"),
    ],
)
def test_usual_links(text, links):
    assert device_list.read_device_list(text).usual_links == links


@pytest.mark.parametrize(
    "change, error, says",
    [
        (("count = 3", "count = 0"), CostError, "count of fast is 0"),
        (("count = 3", "count = true"), CostError, "count of fast is True"),
        (("count = 3", "count = 2000"), UsageError, "these are 2001"),
        (("count = 3", "cuont = 3"), CostError, "fast has an unknown field 'cuont'"),
        (("bandwidth = 900e9", ""), CostError, "fast has no bandwidth"),
        (('links = "ethernet100"', "links = 5"), CostError, "links is 5"),
        (('links = "ethernet100"', "links = "), CostError, "is not TOML"),
        (('links = "ethernet100"', "link = 'pcie4'"), CostError, "link is not a table"),
    ],
)
def test_bad_files_of_devices(described, change, error, says):
    path = described(DEVICES.replace(*change))
    with pytest.raises(error, match=re.escape(says)) as raised:
        device_list.read_device_list(str(path))
    assert raised.value.remedy


def test_files_without_devices(described, tmp_path):
    with pytest.raises(CostError, match="describes no device"):
        device_list.read_device_list(str(described('links = "pcie4"')))
    with pytest.raises(FileError, match="cannot be read"):
        device_list.read_device_list(str(tmp_path / "none.toml"))


def test_prices_are_of_a_device_in_a_file_with_counts_and_links(described, graph):
    assert kind_of_costs(graph, (), f"roofline:{described()}:fast").device.bandwidth == 900e9
    with pytest.raises(UsageError, match="describes no device 'none'"):
        check_costs(f"fused:{described()}:none")


# ---- plans


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan for four H200 under 1F1B: the folder, and what was printed as JSON."""
    folder = tmp_path_factory.mktemp("placed")
    words = ["--devices", "4xh200", "--memory", "80GiB", "--schedule", "1f1b", "--microbatches", "8"]
    words += [
        "--trace",
        folder / "timeline.json",
        "--order",
        folder / "order.csv",
        "-o",
        folder / "plan.json",
        "--json",
    ]
    with redirect_stdout(io.StringIO()) as printed:
        assert cli.main([*GPT2, *map(str, words)]) == 0
    return folder, json.loads(printed.getvalue())


def test_a_schedule_on_devices_that_are_alike(written, graph):
    _, found = written
    assert found["placement"] == {
        "devices": ["h200"] * 4,
        "stages": 4,
        "schedule": "1f1b",
        "microbatches": 8,
        "memory": 80 * 2**30,
        "links": "nvlink4",
        "optimizer": "adam",
        "objective": "throughput",
        "tokens": None,
        "replicas": [1],
    }
    policy = sk.policies.Stages(4, "1f1b", 8, "80GiB", "nvlink4")
    costs = sk.costs.roofline(graph, "h200")
    plan = sk.plan(graph, policy, costs)
    claim = found["report"]["claim"]
    assert found["note"] == plan.note and found["report"]["note"].endswith("roofline of h200, backward op by op")
    assert (claim["value"], claim["bound"], claim["solver"]) == (plan.claim.value, plan.claim.bound, plan.claim.solver)
    step, ranks = found["step"], found["ranks"]
    assert step["schedule"] == "1F1B" and step["microbatches"] == 8 and 0 < step["bubble"] < 1
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3] and [r["stages"] for r in ranks] == [[0], [1], [2], [3]]
    assert [r["in_flight"] for r in ranks] == [4, 3, 2, 1]
    assert step["peak"] == max(r["memory"]["peak"] for r in ranks) <= 80 * 2**30
    for rank in ranks:
        memory = rank["memory"]
        parts = sum(memory[name] for name in ("fixed", "saved", "messages", "temporaries"))
        assert memory["peak"] == parts and memory["limit"] == 80 * 2**30
        assert rank["busy"] == pytest.approx(step["seconds"] * (1 - rank["bubble"]))


def test_the_simulated_step_is_that_of_the_library(written, graph):
    folder, found = written
    plan = sk.Plan.load(str(folder / "plan.json"), graph.graph)
    from splitkit.costs import Links
    from splitkit.pipeline.simulate import simulate_schedule
    from splitkit.pipeline.stage_prices import stage_costs

    stages = stage_costs(sk.analyze(graph), plan, sk.costs.roofline(graph, "h200"))
    run = simulate_schedule(stages, "1f1b", 8, links=Links.preset("nvlink4"))
    assert found["step"]["seconds"] == run.seconds and found["step"]["peak"] == max(run.peaks)
    assert json.loads((folder / "timeline.json").read_text()) == run.to_chrome_trace()
    ordered = sk.order_messages(stages, "1f1b", 8, links=Links.preset("nvlink4"))
    assert load_order(folder / "order.csv").cells == ordered.order.cells
    assert found["messages"] == {
        "file": str(folder / "order.csv"),
        "seconds": ordered.seconds,
        "bound": ordered.bound,
        "gap": ordered.gap,
    }
    assert found["next"].endswith(f"--schedule {folder / 'order.csv'} --check")


def test_an_order_is_written_for_replicas():
    even = [StageCosts(1, 1, replicas=2), StageCosts(1, 1, replicas=2)]
    assert _ordered(sk.simulate_schedule(even, "1f1b", 4, links=sk.costs.Links.preset("nvlink4"))).gap == 0


def test_the_plan_file_is_one_like_any_other(written, call, data):
    folder, _ = written
    assert {path.name for path in folder.iterdir()} == {"order.csv", "plan.json", "timeline.json"}
    plan = folder / "plan.json"
    assert json.loads(plan.read_text())["model"]["sizes"]["vocab"] == 512
    code, found = data("run", plan, "--check")
    assert code == 0 and found["check"]["same"] and len(found["parts"]) == 4
    code, found = data("profile", plan, "--predict", "--forward-only")
    assert code == 0 and len(found["rows"]) == 5
    assert call("split", plan)[0] == 0


def test_what_people_read(call):
    code, out, err = call(*GPT2, "--size", "layers=2", "--devices", "2xh200", "--schedule", "1f1b")
    assert (code, err) == (0, "") and "…" not in out
    for line in (
        r"devices +2 x h200",
        r"memory +131 GiB per device",
        r"links +nvlink4, usual for h200 \(--links changes it\)",
        r"solver +\w+",
    ):
        assert re.search(line, out), line
    for word in ("purpose     training with adam", "1F1B of 4 microbatches, bubble", "of 131 GiB", "proven optimal"):
        assert word in out
    titles = "rank stages busy bubble in flight fixed saved temporary peak"
    assert next(line for line in out.splitlines() if line.startswith(" rank ")).split() == titles.split()


def test_an_interleaved_schedule_has_two_stages_on_each_device(data):
    code, found = data(*PLAN, "--devices", "2xh200", "--schedule", "zbv", "--links", "none", "--optimizer", "sgd")
    assert code == 0 and found["placement"]["stages"] == 4 and found["placement"]["links"] is None
    assert [r["stages"] for r in found["ranks"]] == [[0, 3], [1, 2]]
    assert len(found["report"]["parts"]) == 4


def test_inference_is_meant_without_a_schedule(data, call):
    code, found = data(*PLAN, "--devices", "2xl4", "--links", "pcie5")
    assert code == 0 and found["step"] is None and found["placement"]["optimizer"] is None
    assert found["placement"]["links"] == "pcie5"
    for rank in found["ranks"]:
        assert rank["bubble"] is rank["in_flight"] is None and rank["memory"]["saved"] == 0
        assert rank["memory"]["limit"] == 24_000_000_000
    code, trained = data(*PLAN, "--devices", "2xl4", "--links", "pcie5", "--optimizer", "adam")
    assert code == 0
    (fixed, busy), (trained_fixed, trained_busy) = sums(found), sums(trained)
    assert trained_fixed > 3.5 * fixed and trained_busy > 1.5 * busy  # gradients and two moments; backward
    out = call(*PLAN, "--devices", "2xl4")[1]
    assert "bubble" not in out and "in flight" not in out and re.search("purpose +inference", out)


def sums(found):
    return sum(rank["memory"]["fixed"] for rank in found["ranks"]), sum(rank["busy"] for rank in found["ranks"])


def test_devices_that_differ(data, described, tmp_path):
    code, found = data(*PLAN, "--devices", "h200,h200,a100", "-o", tmp_path / "p.json")
    assert code == 0 and found["placement"]["links"] == "pcie4" and found["placement"]["stages"] is None
    assert [r["device"] for r in found["ranks"]] == ["h200", "h200", "a100"]
    assert [r["memory"]["limit"] for r in found["ranks"]] == [141_000_000_000] * 2 + [80_000_000_000]
    used = [r for r in found["ranks"] if r["stages"]]
    assert sorted(str(s) for r in used for s in r["stages"]) == sorted(p["part"] for p in found["report"]["parts"])
    code, checked = data("run", tmp_path / "p.json", "--model", TINY, "--check")
    assert code == 0 and checked["check"]["same"]

    code, found = data(*PLAN, "--devices", described())
    assert code == 0 and found["placement"]["devices"] == ["fast"] * 3 + ["slow"]
    assert found["placement"]["links"] == "ethernet100"
    code, found = data(*PLAN, "--devices", "h200,cpu")
    assert code == 0 and [r["memory"]["limit"] for r in found["ranks"]] == [141_000_000_000, None]


def test_latency(data):
    code, found = data(*PLAN, "--devices", "2xh200", "--objective", "latency")
    claim = found["report"]["claim"]
    assert code == 0 and claim["objective"] == "makespan" and 0 < claim["bound"] <= claim["value"]
    assert sum(r["busy"] for r in found["ranks"]) >= claim["value"] * 0.999 or len(found["report"]["parts"]) > 1
    assert len(found["ranks"]) == 2


def test_the_largest_cache_and_the_fastest_stages_with_room_for_one(data, graph):
    code, found = data(*GPT2, "--stages", "2", "--objective", "tokens", "--memory", "1MiB,2MiB")
    claim = found["report"]["claim"]
    plan = sk.plan(graph, sk.policies.Stages(2, objective="tokens", memory=["1MiB", "2MiB"]))
    assert code == 0 and claim["objective"] == "tokens"
    assert claim["value"] == plan.claim.value > 1 and claim["bound"] == plan.claim.bound
    limits, peaks = ([r["memory"][name] for r in found["ranks"]] for name in ("limit", "peak"))
    assert limits == [2**20, 2**21] and all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert max(limit - peak for peak, limit in zip(peaks, limits, strict=True)) < 2**20, "the cache is in the peak"
    code, found = data(*GPT2, "--stages", "2", "--tokens", "100", "--memory", "1MiB,2MiB")
    assert code == 0 and found["report"]["claim"]["objective"] == "bottleneck" and "of cache" in found["note"]


@pytest.mark.parametrize("training", [False, True])
def test_the_purpose_is_that_of_python(data, graph, training):
    flags = ["--training"] if training else []
    code, found = data(*GPT2, "--stages", "2", "--memory", "1GiB", *flags)
    costs = sk.costs.flops(graph)
    plan = sk.plan(graph, sk.policies.Stages(2, memory="1GiB"), sk.costs.training(costs) if training else costs)
    assert code == 0 and found["placement"]["optimizer"] == ("adam" if training else None)
    assert found["note"] == plan.note and ("training with adam: " if training else "inference: ") in plan.note


def test_stages_without_a_kind_of_device(data):
    code, found = data(*PLAN, "--stages", "3", "--schedule", "gpipe", "--costs", "unit", "--memory", "1GiB")
    assert code == 0 and found["placement"]["devices"] is None and found["placement"]["links"] is None
    assert [r["device"] for r in found["ranks"]] == [None] * 3
    assert [r["memory"]["limit"] for r in found["ranks"]] == [2**30] * 3
    assert found["step"]["microbatches"] == 6  # two a stage
    code, found = data(*PLAN, "--stages", "3")  # as ever
    assert code == 0 and "ranks" not in found


def test_stages_on_several_devices(data, call):
    words = (*PLAN, "--devices", "4xh200", "--replicas", "1,2,4", "--schedule", "1f1b")
    code, found = data(*words)
    replicas = [rank["replicas"] for rank in found["ranks"]]
    assert code == 0 and max(replicas) > 1 and sum(replicas) <= 4
    assert replicas == [part["replicas"] for part in found["report"]["parts"]]
    assert found["step"]["microbatches"] == 8 and found["placement"]["replicas"] == [1, 2, 4]
    assert found["step"]["seconds"] < data(*words[:-4], "--schedule", "1f1b")[1]["step"]["seconds"]
    code, out, _ = call(*words[:-2])
    assert code == 0 and f"x{max(replicas)}" in out


def test_no_plan_fits(call, data, tmp_path):
    words = (*PLAN, "--devices", "2xl4", "--memory", "100KiB", "--schedule", "1f1b", "-o", tmp_path / "p.json")
    code, out, err = call(*words)
    assert (code, out) == (3, "") and err.startswith("error: SK303: ") and "100 KiB" in err
    code, found = data(*words)
    error = failing(found)
    enough = int(re.search(r"(\d+) bytes", error["remedy"])[1])
    assert code == 3 and error["code"] == "SK303" and enough > 100 * 1024
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("devices", "limits"),
    [
        ("2xrtx3090", [12_000_000_000] * 2),
        ("h200,rtx-3060", [70_500_000_000, 6_000_000_000]),
        ("h200,cpu", [70_500_000_000, None]),  # the CPU beside accelerators has no limit
    ],
)
def test_a_share_of_the_memory_of_each_device(data, devices, limits):
    code, found = data(*PLAN, "--devices", devices, "--memory", "50%")
    assert code == 0 and [rank["memory"]["limit"] for rank in found["ranks"]] == limits


def test_memory_as_a_power_of_ten(data):
    code, found = data(*PLAN, "--stages", "2", "--memory", "1e9")
    assert code == 0 and found["placement"]["memory"] == 1_000_000_000


def test_a_plan_says_the_command_that_runs_it(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, train = f"splitkit run p.json --model {TINY} --check", f"splitkit train p.json --model {TINY} --nproc"
    words = {
        ("--stages", "2"): run,
        ("--devices", "2xh200"): run,
        ("--devices", "4xh200", "--schedule", "1f1b", "--replicas", "2"): f"{train} 4 --schedule 1f1b --check",
        ("--devices", "2xh200", "--schedule", "zbv"): f"{train} 2 --schedule zbv --check",
        ("--what", "fwd-bwd", "--policy", "SaveAll()"): run,
    }
    for given, command in words.items():
        code, out, _ = call(*PLAN, *given, "-o", "p.json")
        assert code == 0 and f"\nnext: {command}\n" in out
        make_parser().parse_args(command.split()[1:])
    assert "next:" not in call(*PLAN, "--stages", "2")[1]


def test_the_least_memory(data):
    code, found = data(*PLAN, "--stages", "3", "--schedule", "1f1b", "--costs", "unit", "--memory", "least")
    code_then, free = data(*PLAN, "--stages", "3", "--schedule", "1f1b", "--costs", "unit")
    assert code == code_then == 0 and found["placement"]["memory"] == "least"
    assert found["step"]["peak"] < free["step"]["peak"]


APART = [
    (["--devices", "2xh200", "--what", "fwd-bwd", "--memory", "2GiB"], "--devices cannot be combined with --what"),
    (["--schedule", "1f1b", "--what", "fwd-bwd", "--memory", "2GiB"], "--schedule cannot be combined with --what"),
    (["--devices", "2xh200", "--stages", "2"], "both give the number of stages"),
    (["--devices", "2xh200", "--policy", "Stages(2)"], "--devices cannot be combined with --policy"),
    (["--memory", "1GiB", "--policy", "Stages(2)"], "--memory cannot be combined with --policy"),
    (["--memory", "1GiB"], "--memory needs devices or stages"),
    (["--schedule", "1f1b"], "--schedule needs devices or stages"),
    (["--stages", "2", "--microbatches", "4"], "--microbatches needs --schedule"),
    (["--stages", "2", "--trace", "t.json"], "--trace needs --schedule"),
    (["--stages", "2", "--order", "o.csv"], "--order needs --schedule"),
    (["--stages", "2", "--objective", "latency"], "--objective latency needs --devices"),
    (["--stages", "2", "--objective", "tokens", "--schedule", "1f1b"], "--objective tokens is for inference"),
    (["--stages", "2", "--tokens", "9", "--optimizer", "adam"], "--tokens is for inference"),
    (
        ["--devices", "2xh200", "--tokens", "9", "--objective", "latency"],
        "--tokens cannot be combined with --objective",
    ),
    (["--stages", "2", "--tokens", "9", "--memory", "least"], "--memory least cannot be combined with --tokens"),
    (["--stages", "2", "--training", "--optimizer", "none"], "--optimizer none is for inference"),
    (["--stages", "2", "--memory", "1GiB,much"], "is not a size"),
    (["--devices", "2xh200", "--objective", "latency", "--schedule", "1f1b"], "is for throughput"),
    (["--devices", "2xh200", "--optimizer", "none", "--schedule", "1f1b"], "is for training"),
    (["--devices", "2xh200", "--memory", "much"], "is not a size"),
    (["--devices", "2xh200,"], "is not a kind of device"),
    (["--devices", "4"], "Say which devices, such as --devices 4xh200; or use --stages 4"),
    (["--devices", "RTX3090x2"], "Write 2xRTX3090."),
    (["--devices", "a100:4"], "Write 4xa100."),
    (["--devices", "2x24GB"], "such as rtx-4090 (rtx-4090, l4, rtx-3090, a10 have about as much); or give --memory"),
    (["--devices", "24GB,2x100GB"], "give --memory 24GB,100GB,100GB with --stages 3 in place of --devices."),
    (["--devices", "2x100GB"], "Give --memory 100GB with --stages 2 in place of --devices."),
    (["--stages", "2", "--memory", "80"], "Write --memory 80GB, or 80B if you mean bytes."),
    (["--stages", "2", "--memory", "24,16"], "Write --memory 24GB,16GB, or 24B if you mean bytes."),
    (["--stages", "2", "--memory", "80,24GiB"], "Write --memory 80GB,24GiB, or 80B if you mean bytes."),
    (["--stages", "2", "--memory", "8e1"], "Write --memory 8e1GB, or 8e1B if you mean bytes."),
    (["--what", "fwd-bwd", "--memory", "512"], "Write --memory 512GB, or 512B if you mean bytes."),
    (["--stages", "2", "--view", "page.svg"], "splitkit view PLAN.json -o page.svg"),
    (["--stages", "2", "--memory", "80%"], "is a share, but no device is named"),
    (["--devices", "2xh200", "--memory", "0%"], "is not a share"),
    (["--devices", "2xh200", "--memory", "180%"], "is not a share"),
    (["--devices", "2xh200", "--memory", "80", "GB"], "Write --memory 80GB."),
    (["--stages", "1", "2"], "unrecognized arguments: 2\n  See `splitkit plan --help`."),
    (["--devices", "2xh200", "--memory", "80", "%"], "Write --memory 80%."),
    (["--devices", "2xh200", "--memory", "-1GiB"], "Write --memory 1GiB."),
    (["--stages", "2", "--seed", "3", "4"], "unrecognized arguments: 4"),
    (["--replicas", "1,2"], "--replicas needs devices or stages"),
    (["--replicas", "1,2", "--policy", "Stages(2)"], "--replicas cannot be combined with --policy"),
    (["--stages", "2", "--replicas", "1,0"], "'0' is not a whole number >= 1"),
]
"""Options that do not go together, and what is said of them."""


@pytest.fixture(scope="module")
def refused():
    """What one process says of each of `APART`, and whether it has torch."""
    code = f"""if True:
        import contextlib, io, json, sys
        from splitkit.cli import main
        for words in {[[*GPT2, *words] for words, _ in APART]!r}:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                code = main(words)
            print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(APART)), ids=[says for _, says in APART])
def test_options_that_do_not_go_together(refused, number):
    code, said, has_torch = refused[number]
    assert code == 2 and not has_torch
    assert said.startswith("error: SK601: ") and APART[number][1] in said and said.count("\n") == 2


@pytest.mark.parametrize(
    "words, exit_code, code, says",
    [
        (["--devices", "h200,a100", "--schedule", "1f1b"], 2, "SK601", "needs devices of one kind"),
        (["--devices", "h200,a100", "--objective", "tokens"], 2, "SK601", "the largest cache is planned for devices"),
        (["--stages", "2", "--objective", "tokens"], 2, "SK302", "needs the memory of each device"),
        (["--devices", "h200,a100", "--costs", "unit"], 2, "SK601", "--costs gives each node one price"),
        (["--stages", "4", "--schedule", "1f2b"], 2, "SK330", "no schedule is called '1f2b'"),
        (["--stages", "3", "--schedule", "zbv"], 2, "SK330", "two on each rank"),
        (["--devices", "4xh200", "--schedule", "1f1b", "--microbatches", "2"], 2, "SK330", "2 microbatches"),
        (["--devices", "2xh300"], 1, "SK321", "no device is called 'h300'"),
        (["--devices", "h200,a100", "--replicas", "1,2"], 2, "SK601", "--replicas needs stages on devices of one kind"),
        (["--devices", "2xh200", "--replicas", "1,4"], 2, "SK302", "Stages(replicas=(1, 4))"),
        (["--stages", "4", "--schedule", "zbv", "--replicas", "1,2"], 2, "SK302", "two stages on a rank"),
        (["--devices", "2xh200", "--links", "nvlink9"], 1, "SK322", "no link is called 'nvlink9'"),
        (["--stages", "2", "--schedule", "gpipe", "--trace", "/nowhere/t.json"], 1, "SK504", "/nowhere"),
    ],
)
def test_what_is_found_before_the_model_is_made(data, monkeypatch, words, exit_code, code, says):
    monkeypatch.setattr(models, "build", lambda *a, **k: pytest.fail("the model was made"))
    returned, found = data(*GPT2, *words)
    error = failing(found)
    assert (returned, error["code"]) == (exit_code, code) and says in error["reason"] and error["remedy"]
