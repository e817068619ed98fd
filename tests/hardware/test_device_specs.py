"""The table of devices, files of one's own, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from handgraphs import captured

from splitkit import costs
from splitkit.costs import Device, devices, load_devices
from splitkit.errors import CostError, FileError
from splitkit.hardware.device_specs import find_device

GOOD = """
[mine]
peak = { float32 = 40e12, bfloat16 = 160e12 }
bandwidth = 900e9
memory = 48_000_000_000
launch = 3e-6
source = "its sheet"
[other]
peak.float32 = 1e12
bandwidth = 1e11
memory = 8_000_000_000
"""


def test_the_table_is_whole_and_says_where_it_comes_from():
    table = devices()
    for name, device in table.items():
        assert device.name == name
        assert device.source.startswith("generic:" if name == "cpu" else "https://")
        assert device.launch > 0


def test_figures_of_data_sheets_dense():
    a100, h100, h200, ada, l4 = (devices()[n] for n in ("a100", "h100", "h200", "rtx-4090", "l4"))
    assert (a100.rate(torch.float32), a100.rate("tf32"), a100.rate(torch.bfloat16)) == (19.5e12, 156e12, 312e12)
    assert (a100.bandwidth, a100.memory) == (2.039e12, 80e9)
    assert 2 * h100.rate(torch.bfloat16) == 1979e12 and 2 * h100.rate(torch.float8_e4m3fn) == 3958e12
    assert h100.peak == h200.peak and h200.bandwidth == 4.8e12 and h200.memory == 141e9
    assert ada.rate(torch.float16) == 165.2e12 and ada.bandwidth == 1.008e12
    assert 2 * l4.rate(torch.float16) == 242e12 and l4.bandwidth == 300e9
    for ada_like in (ada, l4):
        assert ada_like.rate(torch.float32) / ada_like.rate(torch.float64) == pytest.approx(64, rel=0.01)


def test_the_table_cannot_be_changed_by_its_readers():
    known = len(devices())
    devices().clear()
    assert len(devices()) == known > 0


def test_figures_of_the_cards_that_people_own():
    known = devices()
    bf16 = {name: device.rate(torch.bfloat16) / 1e12 for name, device in known.items()}
    assert (bf16["rtx-3060"], bf16["rtx-3090"], bf16["rtx-5090"], bf16["a6000"]) == (25.5, 71, 209.5, 154.8)
    assert (bf16["a10"], bf16["l40s"], bf16["b200"], bf16["mi300x"]) == (125, 362.05, 2250, 1307.4)
    for old in ("v100", "t4"):  # their tensor cores know float16 only
        assert known[old].rate(torch.bfloat16) == known[old].rate(torch.float32) < known[old].rate(torch.float16)
    for name in ("rtx-3060", "rtx-3090", "rtx-5090", "a6000", "a10", "l40s"):
        assert known[name].rate(torch.float32) / known[name].rate(torch.float64) == pytest.approx(64, rel=0.01)
    memory = {name: device.memory / 1e9 for name, device in known.items()}
    assert [memory[n] for n in ("rtx-3060", "rtx-3090", "rtx-5090", "a6000", "a10", "v100")] == [12, 24, 32, 48, 24, 32]


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "rtx4090", "Rtx_4090"])
def test_names_are_found_in_any_spelling(name):
    assert find_device(name) == devices()["rtx-4090"]


def test_rates_of_dtypes_that_a_device_does_not_have():
    device = Device("d", {"float32": 8.0, "float16": 16.0}, 1.0, 1)
    rates = {
        torch.bfloat16: 16.0, torch.float8_e5m2: 16.0, "tf32": 8.0, torch.int8: 8.0, torch.int64: 8.0, torch.bool: 8.0,
        torch.float64: 4.0, torch.complex64: 2.0, torch.complex128: 1.0, torch.complex32: 4.0,
    }  # fmt: skip
    assert {dtype: device.rate(dtype) for dtype in rates} == rates
    assert Device("d", {"float32": 8.0}, 1.0, 1).rate(torch.float8_e4m3fn) == 8.0
    assert Device("d", {"float32": 8.0, "int8": 32.0}, 1.0, 1).rate(torch.uint8) == 32.0


def test_devices_of_ones_own(tmp_path: Path):
    (tmp_path / "d.toml").write_text(GOOD)
    mine = load_devices(tmp_path / "d.toml")
    peak = {"float32": 40e12, "bfloat16": 160e12}
    assert mine["mine"] == Device("mine", peak, 9e11, 48_000_000_000, 3e-6, "its sheet")
    assert mine["other"].launch == 0 and mine["other"].source == ""
    assert find_device(mine["mine"]) is mine["mine"]


def test_devices_are_values():
    peak = {"float32": 1e12}
    device = Device("d", peak, 1e9, 1)
    peak["float32"] = 2.0
    assert device.rate(torch.float32) == 1e12
    assert pickle.loads(pickle.dumps(device)) == device == copy.deepcopy(device)
    assert len({device, copy.copy(device)}) == 1


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("bandwidth = 900e9", "bandwith = 900e9", r"mine has an unknown field 'bandwith'\n  Did you mean bandwidth\?"),
        ("bandwidth = 900e9", "", "mine has no bandwidth"),
        ("bandwidth = 900e9", 'bandwidth = "fast"', "mine.*bandwidth is 'fast'"),
        ("bandwidth = 900e9", "bandwidth = -1", "mine.*bandwidth is -1"),
        ("bandwidth = 900e9", "bandwidth = nan", "mine.*bandwidth is nan"),
        ("bandwidth = 900e9", "bandwidth = inf", "mine.*bandwidth is inf"),
        ("memory = 48_000_000_000", "memory = 48e9", "mine.*memory is 48000000000.0"),
        ("memory = 48_000_000_000", "memory = true", "mine.*memory is True"),
        ("launch = 3e-6", "launch = -3e-6", "mine.*launch is -3e-06"),
        ("launch = 3e-6", "launch = [1]", r"mine.*launch is \[1\]"),
        ('source = "its sheet"', "source = 3", "mine.*source is not a string"),
        ("float32 = 40e12, ", "", "mine.*peak has no float32"),
        ("bfloat16 = 160e12", "bfloat6 = 160e12", r"unknown dtype 'bfloat6'\n  Did you mean bfloat16\?"),
        ("bfloat16 = 160e12", "bfloat16 = 0", "peak of bfloat16 is 0"),
        ("[mine]", "[mine", "is not TOML"),
        ("[mine]", "mine = 3\n[also]", "mine is not a table"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path, old, new, reason):
    path = tmp_path / "d.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(CostError, match=rf"(?s)SK320: .*d\.toml.*{reason}") as caught:
        load_devices(path)
    assert caught.value.remedy


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"SK504: .*none\.toml cannot be read"):
        load_devices(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="SK504"):
        load_devices(tmp_path / "b.toml")


@pytest.mark.parametrize("name", ["a1000", "", None, 3])
def test_a_device_that_nobody_knows(name):
    with pytest.raises(CostError, match=r"(?s)SK321: no device is called .*Known are cpu, a100"):
        find_device(name)


GIVEN = {"name": "d", "peak": {"float32": 1e12}, "bandwidth": 1e9, "memory": 10**9}


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("name", "", "device '': name is not a string\n  Give it a name."),
        ("name", 3, "device 3: name is not a string\n  Give it a name."),
        ("source", None, "device 'd': source is not a string\n  Say where the figures come from."),
        *(
            ("kernels", wrong, f"device 'd': kernels is {wrong!r}\n  Give \"cpu\", or \"sm\" and the compute "
             'capability of a CUDA device: "sm90".')
            for wrong in ("sm9", "sm9000", "cpus", "", 90, None)
        ),
        *(
            ("peak", wrong, "device 'd': peak has no float32\n  Give FLOP/s by dtype: {\"float32\": 19.5e12}.")
            for wrong in ({}, {"float16": 1.0}, [1.0], None)
        ),
        (
            "peak", {"float32": 1.0, "?": 1.0},
            "device 'd': peak has an unknown dtype '?'\n  Known are bfloat16, complex128, complex32, complex64, "
            "float16, float32, float64, float8, int8, tf32.",
        ),
        (
            "peak", {"float32": 1.0, "tf32": -1},
            "device 'd': peak of tf32 is -1\n  Give a positive number of FLOP/s, 1e-06 to 1e+30.",
        ),
        *(
            ("bandwidth", wrong, f"device 'd': bandwidth is {wrong!r}\n  Give a positive number of bytes a second, "
             "1e-06 to 1e+30.")
            for wrong in (0, 1e-7, 1e31, "fast", None)
        ),
        *(
            ("memory", wrong, f"device 'd': memory is {wrong!r}\n  Give a positive number of bytes, a whole number, "
             "1e-06 to 1e+30.")
            for wrong in (0, 1.5, -1, "much", None)
        ),
        *(
            ("launch", wrong, f"device 'd': launch is {wrong!r}\n  Give seconds, 0 or more, 1e+12 at most.")
            for wrong in (-1e-6, 2e12, "soon", None)
        ),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong(field, value, text):
    with pytest.raises(CostError) as caught:
        Device(**{**GIVEN, field: value})
    assert str(caught.value) == f"SK320: {text}"


def test_the_limits_of_figures_are_allowed_themselves():
    device = Device("d", {"float32": 1e-6, "tf32": 1e30}, 1e30, 1, 1e12, kernels="sm120")
    assert (device.rate("tf32"), device.rate("float32"), device.launch) == (1e30, 1e-6, 1e12)
    assert Device("d", {"float32": 1.0}, 1e-6, "80 GiB", 0).memory == 80 * 2**30


def test_the_expression_of_a_device_makes_it_again():
    assert find_device("A100").expression == "'a100'"
    own = Device("a100", {"float32": 2.0}, 3.0, 4, 0.5, "mine", "cpu")  # the name of another device
    assert own.expression == (
        "Device(name='a100', peak={'float32': 2.0}, bandwidth=3.0, memory=4, launch=0.5, source='mine', kernels='cpu')"
    )
    assert eval(own.expression, {"Device": Device}) == own


def test_only_the_kernels_of_the_cpu_are_its():
    assert [name for name, device in devices().items() if device.is_cpu] == ["cpu"]


@pytest.mark.parametrize(
    "table", ["mine = 3", "[mine]\n", "[mine]\npeak.float32 = 1.0\nbandwidth = 2.0", "[mine]\nq = 1"]
)
def test_what_a_file_lacks_is_said_with_the_file(tmp_path, table):
    expected = {
        "mine = 3": "mine is not a table\n  Write [mine] above the fields of a device.",
        "[mine]\n": "mine has no peak\n  A device needs peak, bandwidth, memory.",
        "[mine]\nq = 1": "mine has an unknown field 'q'\n  Known are bandwidth, kernels, launch, memory, peak, source.",
    }.get(table, "mine has no memory\n  A device needs peak, bandwidth, memory.")
    path = tmp_path / "d.toml"
    path.write_text(table)
    with pytest.raises(CostError) as caught:
        load_devices(path)
    assert str(caught.value) == f"SK320: {path}: {expected}"


def test_the_hint_for_a_name_that_is_nearly_known():
    with pytest.raises(CostError, match=r"^SK321: no device is called 'a10O'\n  Did you mean a10"):
        find_device("a10O")


def test_a_peak_that_a_reader_changes_changes_for_nobody_else():
    rate = costs.devices()["a100"].rate(torch.float32)
    gm = captured(lambda self, x: x.sin(), torch.ones(3))
    costs.devices()["a100"].peak["float32"] = 1
    costs.roofline(gm, "a100").device.peak["float32"] = 1
    assert costs.roofline(gm, "a100").device.rate(torch.float32) == rate


def test_numbers_of_numpy_describe_devices_and_links():
    device = costs.Device("mine", {"float32": np.float32(2e12)}, np.int64(10**9), np.int64(10**9))
    assert device.rate(torch.float32) == np.float32(2e12)
    assert costs.Links.uniform(np.float32(1e9)).seconds(0, 1, np.int64(10**9)) == pytest.approx(1)
