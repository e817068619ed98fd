"""``splitkit profile --ranks`` on two real processes: what it compares, and bounds; no time is held to anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import command
from ownorders import own_order

import splitkit as sk
from splitkit.cli.commands.profile import _pairs, _ranks_text
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import MeasuredStep
from splitkit.runtime.ranks.measurements import moving_peaks, one_by_one, timed_stages, with_inner_bytes

SPEC = f"{Path(__file__).parent / 'tinynet.py'}:net"
RECENT = torch.__version__ >= "2.13"  # older ones run neither zero bubbles nor dropout in several stages
SCHEDULES = ["GPipe", "1F1B", *["InterleavedZeroBubble"] * RECENT]
TINY = ["--size", "layers=4,width=32,heads=2", "--size", "vocab=64,seq=32", "--seed", "3"]


def profile(*schedules, more=()):
    words = ["profile", SPEC, *TINY, "--stages", "2", "--ranks", "2", "--microbatches", "4", "--repeat", "1"]
    run = command(*words, *["--eval"] * (not RECENT), "--schedules", ",".join(schedules), *more, "--json")
    return run.returncode, json.loads(run.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    code, data = profile(*map(str.lower, SCHEDULES), more=["--trace", str(folder / "ran.json")])
    assert code == 0
    return data


@pytest.mark.skipif(RECENT, reason="this torch runs it")
def test_a_schedule_that_this_torch_cannot_run_is_refused_by_name():
    code, data = profile("1f1b", "interleavedzerobubble")
    assert code == 1 and data["error"]["code"] == "SK806"
    assert "InterleavedZeroBubble one by one on 2 ranks needs torch 2.13" in data["error"]["reason"]


def test_each_schedule_is_predicted_and_run(found):
    assert [run["schedule"] for run in found["schedules"]] == SCHEDULES
    count = len(SCHEDULES) * (len(SCHEDULES) - 1) // 2
    for run in found["schedules"]:
        assert [row["rank"] for row in run["ranks"]] == [0, 1] and [row["stages"] for row in run["ranks"]] == [[0], [1]]
        for both in (run["step"], *(row["busy"] for row in run["ranks"])):
            assert both["predicted"] > 0 < both["measured"]
            assert both["error"] == pytest.approx(both["predicted"] / both["measured"] - 1)
        assert all(row["busy"]["measured"] <= run["step"]["measured"] for row in run["ranks"])
        assert all(link["bandwidth"] > 0 <= link["latency"] for link in run["links"]) and len(run["links"]) == 2
    assert found["pairs"]["all"] == count and 0 <= found["pairs"]["right"] <= count
    kinds = "FBIW" if RECENT else "FB"
    assert all([kind for kind in "FBIW" if stage[kind] is not None] == list(kinds) for stage in found["stages"])


def test_peaks_are_those_of_the_allocator(found):
    """Bytes do not depend on the clock: they are counted, not timed."""
    peaks = {run["schedule"]: [row["peak"] for row in run["ranks"]] for run in found["schedules"]}
    for schedule, ranks in peaks.items():
        for both in ranks:
            # losses of microbatches and digests of the batch are a few bytes more
            assert both["measured"] - 512 <= both["predicted"] <= 1.5 * both["measured"], schedule
    assert peaks["1F1B"][1]["measured"] < peaks["GPipe"][1]["measured"]
    assert peaks["1F1B"][1]["predicted"] < peaks["GPipe"][1]["predicted"]


def test_a_tied_table_and_logits_are_predicted_to_a_few_bytes():
    """Each is larger than all other activations: ranks sum the table's gradient apart, and logits are not kept."""
    tied = ["--size", "layers=2,width=16,heads=2", "--size", "vocab=30000,seq=32"]
    words = ["profile", SPEC, *tied, "--eval", "--stages", "2", "--ranks", "2", "--microbatches", "4", "--repeat", "1"]
    run = command(*words, "--schedules", "gpipe,1f1b", "--json")
    assert run.returncode == 0, run.stderr
    peaks = [row["peak"] for schedule in json.loads(run.stdout)["schedules"] for row in schedule["ranks"]]
    assert [both["predicted"] for both in peaks] == pytest.approx([both["measured"] for both in peaks], rel=0.01)


def test_peaks_with_recompute_are_those_of_the_allocator_too(found):
    schedules = [name for name in SCHEDULES if name != "1F1B"]
    code, data = profile(*map(str.lower, schedules), more=["--recompute"])
    assert code == 0 and [run["schedule"] for run in data["schedules"]] == schedules
    assert data["note"].endswith("without recompute, which was chosen afterwards")
    plain = {run["schedule"]: [row["peak"] for row in run["ranks"]] for run in found["schedules"]}
    for run in data["schedules"]:
        for both, without in zip((row["peak"] for row in run["ranks"]), plain[run["schedule"]], strict=True):
            assert 0.95 * both["measured"] <= both["predicted"] <= 1.25 * both["measured"], run["schedule"]
            assert both["measured"] < 0.8 * without["measured"] and both["predicted"] < 0.8 * without["predicted"]


def test_the_traces_tell_what_each_rank_did_and_held(found):
    for run in found["schedules"]:
        step = MeasuredStep.load(run["trace"])
        assert Path(run["trace"]).name == f"ran-{run['schedule']}.json" and step.schedule == run["schedule"]
        assert step.order.ranks == pipeline_order(step.schedule, 2, 4, 2).ranks
        assert 0 < step.seconds <= run["step"]["measured"] * 1.5  # one step was timed; this is without the barrier
        for rank, row in enumerate(run["ranks"]):
            assert step.busy[rank] == pytest.approx(row["busy"]["measured"])
            # bytes of the step before the first action and after the last belong to no action
            assert 0.5 * row["peak"]["measured"] < max(p[1] for p in step.memory[rank]) <= row["peak"]["measured"]
            assert len(step.memory[rank]) == 2 * len(step.order.ranks[rank])


def test_what_the_command_writes_is_for_people_too(found):
    facts, _, table, _, note, *written = _ranks_text(found | {"oversubscribed": True})
    assert len(written) == len(SCHEDULES) and "splitkit view" in written[0]
    assert table.row_count == 2 * len(SCHEDULES) and "allocator" in note and facts is not None


def test_pairs_are_counted():
    def step(predicted, measured):
        return {"step": {"predicted": predicted, "measured": measured}}

    assert _pairs([step(1, 2), step(2, 3), step(3, 1)]) == {"right": 1, "all": 3}


def test_stages_are_timed_one_after_the_other():
    order = one_by_one(pipeline_order("zbv", 4, 2), 2)
    assert order.rank_of == (0, 1, 1, 0) and order.microbatches == 2
    assert " ".join(map(str, order.ranks[0])) == "0F0 3F0 3B0 0B0 0F1 3F1 3I1 0I1 3W1 0W1"
    whole = one_by_one(own_order(["0F0 0B0", "1F0 1B0"]), 2)
    assert {a.kind for row in whole.ranks for a in row} == {"F", "B"}


def test_measured_times_replace_those_of_the_prices():
    seconds = {(0, "F"): [1.0, 9.0, 2.0], (0, "B"): [4.0], (0, "I"): [3.0], (0, "W"): [2.0]}
    stage = StageCosts(7, 7, 7, saved_bytes=5, unit="FLOP")
    (plain,), (divided,) = timed_stages([stage], seconds, False), timed_stages([stage], seconds, True)
    assert (plain.forward, plain.backward, plain.backward_weight) == (2, 4, 0) and plain.unit == "s"
    assert (divided.backward_input, divided.backward_weight, divided.saved_bytes) == (3, 2, 5)


def test_what_a_stage_alone_was_measured_to_hold_raises_its_temporary_bytes():
    order = one_by_one(own_order(["0F0 0B0", "1F0 1B0"]), 1)
    stages = [StageCosts(1, 1, temporary_bytes=5), StageCosts(1, 1, temporary_bytes=50)]
    # (the most, what lasts) before an action and during it: forward of stage 0 takes 20 inside, its backward 14 with
    # what comes before it; stage 1 at most 30, and 200 before its first action, which no action takes
    held = [[(0, 0), (120, 100), (110, 110), (114, 0)], [(200, 0), (90, 60), (60, 60), (70, 10)]]
    first, last = with_inner_bytes(stages, order, held)
    assert (first.temporary_bytes, last.temporary_bytes) == (20, 50)


def test_the_gradient_of_a_tied_weight_is_there_when_the_next_backward_begins():
    stages = [StageCosts(1, 1, saved_bytes=10), StageCosts(1, 1, saved_bytes=10, temporary_bytes=5)]
    run = sk.simulate_schedule(stages, "gpipe", 4)
    assert moving_peaks(run, {}) == (40, 45) and moving_peaks(run, {1: 20}) == (40, 3 * 10 + 20 + 5)


NET = """
import torch, transformers
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 32, 256], depths=[1, 1, 1, 3], image_size=64)
        self.norm, self.net = nn.BatchNorm2d(3), transformers.ConvNextForImageClassification(config)
    def forward(self, x):
        return self.net(self.norm(x)).logits
def net():
    return Net(), (torch.ones(4, 3, 64, 64),)
"""


RESNET = """
import torch, transformers
def net():
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[2] * 4)
    net = transformers.ResNetForImageClassification(config)
    return net, {"pixel_values": torch.ones(4, 3, 64, 64), "labels": torch.tensor([0, 1, 0, 1])}
"""


@pytest.mark.campaign
@pytest.mark.parametrize(("text", "loss", "inside"), [(NET, ["--loss", "cross_entropy"], 0.2), (RESNET, [], 0.01)])
def test_what_kernels_of_convolutions_take_inside_is_counted_and_statistics_are_those_of_the_start(
    text, loss, inside, tmp_path
):
    """Copies in the layout of oneDNN are most of the peak; each schedule starts from the buffers of the model.

    Ranks compare their batches before the first action: bytes of that are in no action, and may be the peak.
    """
    (tmp_path / "convs.py").write_text(text)
    words = ["profile", f"{tmp_path / 'convs.py'}:net", *loss, "--stages", "2", "--ranks", "2"]
    run = command(*words, "--microbatches", "2", "--repeat", "1", "--schedules", "gpipe,1f1b", "--json")
    assert run.returncode == 0, run.stderr
    data = json.loads(run.stdout)
    peaks = [row["peak"] for schedule in data["schedules"] for row in schedule["ranks"]]
    assert max(data["inside_kernels"]) > 0 and "measured of each stage alone" in _ranks_text(data)[-1]
    assert all(both["measured"] - 512 <= both["predicted"] <= (1 + inside) * both["measured"] for both in peaks)


SOUND = """
import torch, transformers
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.WhisperConfig(
            d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=256, max_source_positions=100
        )
        self.encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        return self.head(self.encoder(x).last_hidden_state.mean(1))
def net():
    return Net(), (torch.ones(4, 80, 200),)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("more", [[], ["--recompute"]])
def test_inputs_as_large_as_what_is_saved_and_gradients_that_gpipe_keeps_are_counted_once(tmp_path, more):
    """Spectrograms are a fifth of the first rank's peak; sent gradients, half of the last one's if it recomputes."""
    (tmp_path / "sound.py").write_text(SOUND)
    words = ["profile", f"{tmp_path / 'sound.py'}:net", "--loss", "cross_entropy", "--stages", "2", "--ranks", "2"]
    run = command(*words, "--microbatches", "4", "--repeat", "1", "--schedules", "gpipe,1f1b", *more, "--json")
    assert run.returncode == 0, run.stderr
    ranks = [(row["rank"], row["peak"]) for made in json.loads(run.stdout)["schedules"] for row in made["ranks"]]
    for rank, both in ranks:
        assert both["measured"] <= 1.01 * both["predicted"] <= (1.07 if rank or more else 1.02) * both["measured"]


def test_one_microbatch_is_refused(call):
    code, _, err = call("profile", SPEC, *TINY, "--stages", "2", "--ranks", "2", "--microbatches", "1")
    assert code == 2 and "SK601" in err
