"""The state of a run as JSON: what is read is what was written, and nothing that is read runs code."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError
from splitkit.runtime.folder.checkpoint_reader import METADATA, read_stored, stored_looks
from splitkit.runtime.folder.checkpoint_weights import Weights
from splitkit.runtime.folder.optimizer_state import decode_state, empty_tensors, encode_state
from splitkit.runtime.folder.training_checkpoint import random_state, set_random_state


def through_json(value: object) -> object:
    tensors: dict[str, torch.Tensor] = {}
    data = JsonField("x", "", json.loads(json.dumps(encode_state(value, "x", tensors), allow_nan=False)))
    assert {name: (t.shape, t.dtype) for name, t in empty_tensors(data).items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    return decode_state(data, tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -2.5, "text", float("-inf"), 1 + 2j, b"\x00\xff", [1, [2]], (1, (2, [])), {"a": 1, 2: {"b": ()}},
        Counter({2: 1, 4: 2}), np.float32(0.1), np.int64(2**62), torch.float16, {"tensor": {"name": "x"}}, {"dict": []},
        slice(1, None), {(1, "a"): 0.1},
    ],
)  # fmt: skip
def test_state_is_what_it_was_after_json(value):
    found = through_json(value)
    assert found == value and type(found) is type(value)


def test_tensors_and_arrays_are_kept_apart():
    found = through_json({"a": [torch.arange(3), (torch.tensor(2.5, dtype=torch.bfloat16),)], "b": np.arange(4.0)})
    assert found["a"][0].tolist() == [0, 1, 2] and found["a"][1][0].dtype == torch.bfloat16
    assert isinstance(found["b"], np.ndarray) and found["b"].tolist() == [0, 1, 2, 3] and found["b"].dtype == np.float64


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (lambda: 0, "x"), ({"a": [1, object()]}, "x.a.1"), ({"a": torch.ones(2).to_sparse()}, "x.a"), ({1, 2}, "x"),
        (torch.ones(2, device="meta"), "x"), (np.array([None]), "x"),
    ],
)  # fmt: skip
def test_what_is_not_data_is_refused_by_its_path(value, where):
    with pytest.raises(FileError, match=f"SK506: a checkpoint cannot hold {where}, which"):
        encode_state(value, "x", {})


@pytest.mark.parametrize(
    "data",
    [
        {"tensor": {"name": "y", "dtype": "float32", "shape": []}}, {"counter": [1]}, {"bytes": "zz"},
        {"numpy": ["O", 1]}, {"numpy": ["float32", "x"]}, {"dict": [[[1], 2]]}, {"unknown": 1}, {"node": "x"},
        {"float": "x"},
    ],
)  # fmt: skip
def test_damaged_state_is_refused(data):
    with pytest.raises(FileError, match="SK505"):
        decode_state(JsonField("x", "", data), {})


def test_random_numbers_go_on_where_they_were():
    def draw() -> tuple[float, ...]:
        return random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))

    draw()
    kept = through_json(random_state(torch.device("cpu")))
    after = draw()
    assert draw() != after
    set_random_state(kept, torch.device("cpu"))
    assert draw() == after


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil"),)


def test_reading_a_checkpoint_runs_no_code_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "kept"
    checkpoint.save({"a": torch.ones(2), "b": {"c": Evil()}}, checkpoint_id=place, no_dist=True)
    tensor = torch.zeros(2)
    read_stored(place, {"a": tensor})
    assert tensor.tolist() == [1, 1] and stored_looks(place) == {"a": ((2,), torch.float32)}
    for name, wanted, text in (("b.c", tensor, "is not in it"), ("a", torch.zeros(3), "is float32.2. in it")):
        with pytest.raises(FileError, match=f"SK507: .*{name}.*{text}"):
            read_stored(place, {name: wanted})
    described = pickle.loads((place / METADATA).read_bytes())
    described.planner_data = Evil()
    (place / METADATA).write_bytes(pickle.dumps(described))
    with pytest.raises(FileError, match="SK504: cannot read .*kept: .metadata holds .*which describes no tensor"):
        Weights.at(place)
    described.planner_data = None
    next(iter(described.storage_data.values())).relative_path = "../other"
    (place / METADATA).write_bytes(pickle.dumps(described))
    with pytest.raises(FileError, match="SK504: .*names the file '../other'"):
        read_stored(place, {"a": tensor})
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", ["dict", "counter"])
def test_an_array_is_no_key_of_a_damaged_state(kind):
    data = {kind: [[{"array": {"tensor": {"name": "y", "dtype": "float32", "shape": [2]}}}, 1]]}
    with pytest.raises(FileError, match="SK505"):
        decode_state(JsonField("x", "", data), {"y": torch.ones(2)})
