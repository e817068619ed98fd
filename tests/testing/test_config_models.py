"""Configurations of transformers are read as transformers reads them, and wrong ones are refused."""

from __future__ import annotations

import json
import math

import pytest

from splitkit.errors import CaptureError, FileError
from splitkit.testing.config_files import read_config
from splitkit.testing.config_models import config_at

pytest.importorskip("transformers")


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path):
    from transformers import AutoConfig, Mamba2Config

    Mamba2Config(num_hidden_layers=1).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert tuple(config_at(str(tmp_path)).time_step_limit) == (0.0, math.inf)
    assert config_at(str(tmp_path)).to_diff_dict() == AutoConfig.from_pretrained(tmp_path).to_diff_dict()


def test_a_field_of_another_type_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(CaptureError, match="SK401: transformers refuses the configuration of .*'hidden_size'"):
        config_at(str(tmp_path))


def test_an_object_that_is_no_number_is_a_configuration_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": {"__float__": "wide"}}')
    with pytest.raises(FileError, match="SK504: .* cannot be read: could not convert string to float"):
        config_at(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": {"__float__": [1]}}')
    assert read_config(str(tmp_path))["rope_theta"] == {"__float__": [1]}  # as transformers reads it
