"""Models of torch.ao.quantization: what is said when they are not captured, and that the advice works."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.policies import ByName

pytestmark = pytest.mark.skipif(
    not {"x86", "fbgemm", "qnnpack"} & {*torch.backends.quantized.supported_engines}, reason="torch runs no int8 here"
)
PARTS = ByName({"0": 0, "2": 1})
X = torch.linspace(-1.0, 1.0, 16).reshape(2, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def dynamic(dtype: torch.dtype) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(net().eval(), {nn.Linear}, dtype=dtype)


def static() -> nn.Module:
    ao = torch.ao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(ao.QuantStub(), *net(), ao.DeQuantStub()).eval()
        model.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
        prepared = ao.prepare(model)
        prepared(X)
        return ao.convert(prepared)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_dynamically_quantized_models_are_captured_with_their_modules_whole(dtype):
    model = dynamic(dtype)
    with pytest.raises(CaptureError, match="SK401.*its part 0 has packed weights") as caught:
        sk.capture(model, X)
    assert 'how="symbolic_trace"' in caught.value.remedy and "splitkit.apply" not in caught.value.remedy
    gm = sk.capture(model, X, how="symbolic_trace")  # as advised
    sk.compare(model, sk.split(gm, PARTS), X).raise_if_different()


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_statically_quantized_models_are_split_without_sizes(how):
    model = static()
    with pytest.raises(CaptureError, match="SK401.*packed weights") as caught:
        sk.capture(model, X, how=how)
    assert "torch.fx.symbolic_trace(model)" in caught.value.remedy
    parts = ByName({"1": 0, "3": 1})
    sk.compare(model, sk.split(torch.fx.symbolic_trace(model), parts), X).raise_if_different()  # as advised


def test_packed_weights_have_no_joint_graph():
    with pytest.raises(CaptureError, match="SK401.*packed weights") as caught:
        sk.capture_joint(dynamic(torch.qint8), X, loss=torch.sum)
    assert "Packed weights have no gradient" in caught.value.remedy and "prepare_qat" in caught.value.remedy
    assert "TORCH_LOGS" not in caught.value.remedy


def test_a_missing_loss_is_the_reason_where_dynamo_does_not_take_the_model():
    model = net().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        model = torch.ao.quantization.prepare_qat(model)
    with pytest.raises(CaptureError, match="SK401: Sequential cannot be captured with its gradients") as caught:
        sk.capture_joint(model, X)
    assert "returns no loss" in caught.value.reason and "loss=lambda output" in caught.value.remedy
    assert sk.capture_joint(model, X, loss=torch.sum).signature.gradients  # as advised
