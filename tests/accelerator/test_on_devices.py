"""`to_devices` on the simulated accelerator: the numbers of the CPU, no races, and every planted race found."""

from __future__ import annotations

import pytest
import simgpu
from campaigns import these_first
from launch import launch

pytestmark = pytest.mark.skipif(bool(simgpu.missing()), reason=simgpu.missing())

SCRIPT = "accelerator/on_devices.py"


@pytest.mark.parametrize(
    "name, devices", these_first([("gpt2", 3), ("unet", 4)], [("t5", 4), ("llama", 2), ("vit", 2)])
)
def test_models_train_as_on_the_cpu(name, devices):
    (found,) = launch(SCRIPT, 1, "same", name, str(devices))
    assert found["apart"] < 1e-9, found
    assert found["devices"] == devices and found["compared"] > 20
    assert not found["races"]


@pytest.mark.parametrize("name", these_first(["gpt2"], ["llama"]))
def test_a_loop_with_dropout_has_the_losses_of_the_cpu(name):
    """Each device draws from a generator of its own, and so does each part on the CPU in the comparison."""
    (found,) = launch(SCRIPT, 1, "loop", name, "2")
    assert found["steps"] == 10 and found["drawn"] == 2
    assert found["apart"] < 1e-9 and not found["races"]


def test_a_device_without_an_index_is_the_current_one():
    """With index 0 current, parts 0 and 1 are on one device; with index 1, parts 1 and 2."""
    (found,) = launch(SCRIPT, 1, "named")
    assert found["moved"] == [["simgpu:1"], ["simgpu:1"]] and not found["races"]


@pytest.mark.parametrize("families", these_first(["t5"], ["llama llava mamba"]))
def test_decoders_generate_as_on_the_cpu(families):
    lines = launch("accelerator/generating.py", 1, *families.split())
    assert len(lines) == len(families.split())
    for found in lines:
        assert found["same"] and not found["races"], found
        assert all(devices == ["simgpu:0", "simgpu:1"] for devices in found["devices"]), found


RUNS = [
    "a tied weight", "a written buffer", "a written buffer with gradients", "a gradient that is added to",
    "an input that is written after the call", "an output that is written after the call", "a value on two devices",
    "memory of the CPU",
]  # fmt: skip

PLANTED = {
    "a part does not wait for the copy": "has not finished writing",
    "the copy does not wait for the kernel before it": "has not finished writing",
    "the gradient is not waited for": "has not finished writing",
    "no record_stream": "freed",
    "a written value is not waited for": "still reads",
    "the end of the call waits for nothing, and an input is written": "still reads",
    "the end of the call waits for nothing, and an output is written": "still reads",
    "outputs count as no memory of the caller": "still reads",
    "one event for two devices": "has not finished writing",
    "memory of the CPU is copied while the caller goes on": "memory of the CPU",
}


def test_nothing_races():
    words = [word for run in RUNS for word in ("--", "run", run)]
    found = [line for line in launch(SCRIPT, 1, *words[1:]) if "races" in line]
    assert [line["case"] for line in found] == [[run] for run in RUNS]
    assert [line["races"] for line in found] == [[] for _ in RUNS]


def test_planted_races_are_found():
    words = [word for what in PLANTED for word in ("--", "planted", what)]
    found = {line["case"][0]: line["races"] for line in launch(SCRIPT, 1, *words[1:]) if "races" in line}
    assert found.keys() == PLANTED.keys()
    missed = {what: races for what, races in found.items() if not any(PLANTED[what] in race for race in races)}
    assert not missed
