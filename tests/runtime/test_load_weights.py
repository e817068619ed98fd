"""`splitkit.load`: the weights of a checkpoint on the devices that read them, or a refusal that names the tensor."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from campaigns import these_first

import splitkit as sk
from splitkit.errors import FileError, PipelineError
from splitkit.graph.storages import fills_its_range
from splitkit.runtime import open_stages, pipeline, save_stages
from splitkit.runtime.folder.checkpoint_folder import digest_of_file
from splitkit.runtime.folder.checkpoint_weights import Weights, converted, sources_of
from splitkit.runtime.folder.tensorfiles import stored_tensors, write_tensors

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "t5": lambda: transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    # The other implementation of experts calls an op that differs between the CPU and other devices, meta among them.
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, experts_implementation="batched_mm"
    ),
}
KINDS = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
}


def model_of(family):
    torch.manual_seed(0)
    return getattr(transformers, KINDS[family])(FAMILIES[family]()).eval()


def inputs_of(family):
    ids = torch.arange(8)[None] + 3
    return {"input_ids": ids, "use_cache": False, **({"decoder_input_ids": ids} if family == "t5" else {})}


@cache
def captured(family, dtype=torch.float32):
    """Make and capture a model on meta."""
    with torch.device("meta"):
        made = model_of(family).to(dtype)
    return sk.capture(made, **inputs_of(family))


def on_meta(family, dtype=torch.float32):
    return sk.split(copy.deepcopy(captured(family, dtype)), sk.policies.Stages(2))


@pytest.fixture(scope="module", params=these_first(["llama", "t5"], ["gpt2", "mixtral"]))
def saved(request, tmp_path_factory):
    """A model, and the folder with its shards."""
    whole, folder = model_of(request.param), tmp_path_factory.mktemp(request.param)
    whole.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return request.param, whole, folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    whole, folder = model_of("llama"), tmp_path_factory.mktemp("llama")
    whole.save_pretrained(folder)
    return whole, folder


def state_of(folder):
    (file,) = folder.glob("*.safetensors")
    found = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in stored_tensors(file).items()}
    for name, stored in stored_tensors(file).items():
        stored.read_into(found[name])
    return found


def changed(folder, to, change):
    """Copy a checkpoint with other tensors."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    (file,) = to.glob("*.safetensors")
    state = state_of(folder)
    change(state)
    write_tensors(file, state)
    return to


@pytest.mark.parametrize(
    ("shape", "strides", "fills"),
    [((2, 3), (3, 1), True), ((2, 1, 3), (1, 100, 2), True), ((2, 3), (4, 1), False), ((0, 3), (9, 1), True)],
)
def test_memory_is_filled_in_any_order_of_dimensions(shape, strides, fills):
    """A dimension of size 1 may have any stride."""
    assert fills_its_range(shape, strides) is fills


def test_a_split_on_devices_is_the_model_of_the_checkpoint(saved):
    family, whole, folder = saved
    split = on_meta(family)
    model = sk.load(split, folder, ["cpu:0", "cpu:1"])
    assert torch.equal(model(**inputs_of(family)).logits, whole(**inputs_of(family)).logits)
    own, theirs = model.state_dict(), whole.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in whole.named_parameters()
    }


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def logits_of(held, family):
    """Run two equal microbatches through the stages of a folder."""
    pipe = pipeline(held, "loopedbfs", 2)
    batch = {n: torch.cat([v, v]) if isinstance(v, torch.Tensor) else v for n, v in inputs_of(family).items()}
    first, second = (output.logits for output in pipe.infer(**batch))
    assert torch.equal(first, second)
    return first


def test_ranks_read_the_same_from_the_checkpoint(saved, group, tmp_path):
    family, whole, folder = saved
    save_stages(on_meta(family), tmp_path)
    for stage in range(2):
        alone = open_stages(tmp_path, weights=folder)
        alone.load([stage])
        assert len(alone.tensors) < len(alone.manifest["tensors"].value)
    found = logits_of(open_stages(tmp_path, weights=folder), family)
    # T5 itself gives other last bits with gradients than without.
    with torch.no_grad():
        assert torch.equal(found, whole(**inputs_of(family)).logits)


def test_a_checkpoint_of_the_base_model_has_no_prefix(tmp_path):
    whole = model_of("gpt2")
    whole.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in state_of(tmp_path)
    model = sk.load(on_meta("gpt2"), tmp_path, "cpu")
    assert torch.equal(model(**inputs_of("gpt2")).logits, whole(**inputs_of("gpt2")).logits)
    # The other way round: the base model, from a checkpoint of the whole with its prefix.
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        inner = model_of("gpt2").transformer
    base = sk.load(sk.split(sk.capture(inner, **inputs_of("gpt2")), sk.policies.Stages(2)), tmp_path, "cpu")
    assert torch.equal(base(**inputs_of("gpt2"))[0], whole.transformer(**inputs_of("gpt2"))[0])


def test_what_transformers_leaves_out_of_a_checkpoint_is_left_out(tmp_path):
    """The gpt2 on the Hub has no prefix, and masks that the model no longer has."""
    whole = model_of("gpt2")
    whole.transformer.save_pretrained(tmp_path / "own")
    masked = changed(tmp_path / "own", tmp_path / "hub", lambda state: state.update({"h.0.attn.bias": torch.ones(4)}))
    config = json.loads((masked / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (masked / "config.json").write_text(json.dumps(config))
    model = sk.load(on_meta("gpt2"), masked, "cpu")
    assert torch.equal(model(**inputs_of("gpt2")).logits, whole(**inputs_of("gpt2")).logits)


def test_each_model_inside_another_has_names_of_its_own(tmp_path):
    """The LLaVA on the Hub has the language model and the vision model under the names that each has by itself."""
    from decoders import decoder

    model = decoder("llava")
    model.save_pretrained(tmp_path)
    stored = state_of(tmp_path)
    assert "language_model.model.norm.weight" in stored
    found = sources_of([[name] for name in model.state_dict()], stored, lambda: converted(stored, tmp_path))
    for name, tensor in model.state_dict().items():
        [[own]] = found[name].rows
        assert torch.equal(stored[own], tensor), name


def test_dtypes_are_converted_on_the_way(llama, group, tmp_path):
    whole, folder = llama
    half = changed(folder, tmp_path, lambda s: s.update({n: t.bfloat16() for n, t in s.items()}))
    split = on_meta("llama")
    with pytest.raises(FileError, match=r"SK507: .*bfloat16.*\n.*dtype=torch.float32"):
        sk.load(split, half, "cpu")
    with pytest.raises(FileError, match=r"SK507: the model was captured in torch.float32, not torch.bfloat16"):
        sk.load(split, half, "cpu", dtype=torch.bfloat16)
    model = sk.load(split, half, "cpu", dtype=torch.float32)
    theirs = whole.state_dict()
    assert all(torch.equal(t, theirs[n].bfloat16().float()) for n, t in model.state_dict().items())
    # The buffer that no checkpoint has keeps its precision, as in from_pretrained.
    down = sk.load(on_meta("llama", torch.bfloat16), folder, "cpu", dtype=torch.bfloat16)
    assert torch.equal(down.state_dict()["lm_head.weight"], theirs["lm_head.weight"].bfloat16())
    save_stages(on_meta("llama"), tmp_path / "stages")
    held = open_stages(tmp_path / "stages", weights=half, dtype=torch.float32)
    assert torch.equal(logits_of(held, "llama"), model(**inputs_of("llama")).logits)
    with pytest.raises(FileError, match="SK507: the model was captured"):
        open_stages(tmp_path / "stages", weights=half, dtype=torch.float16)


def test_ranks_refuse_the_weights_of_another_model(llama, tmp_path):
    """A Qwen3 has all names and shapes of this Llama, and norms of its own."""
    norm = "model.layers.1.self_attn.q_norm.weight"
    other = changed(llama[1], tmp_path / "other", lambda state: state.update({norm: torch.ones(8)}))
    save_stages(on_meta("llama"), tmp_path / "stages")
    for stage in range(2):
        with pytest.raises(FileError, match=f"SK507: .* has {norm}, which the model that was split does not have"):
            open_stages(tmp_path / "stages", weights=other).load([stage])
    manifest = tmp_path / "stages" / "manifest.json"
    data = json.loads(manifest.read_text())
    # what the model has and no stage reads is no reason to refuse
    manifest.write_text(json.dumps(data | {"unread": [norm]}))
    digests = manifest.with_name("digests.json")
    digests.write_text(json.dumps(json.loads(digests.read_text()) | {manifest.name: digest_of_file(manifest)}))
    open_stages(tmp_path / "stages", weights=other).load([0])


NORM = "model.norm.weight"
WRONG = {
    "missing": (lambda s: s.pop(NORM), f"has no {NORM}"),
    "several missing": (lambda s: (s.pop(NORM), s.pop("lm_head.weight")), rf"has no .*{NORM}"),
    "unexpected": (lambda s: s.update(extra=torch.ones(1)), "has extra, which the model that was split does not have"),
    "shape": (lambda s: s.update({NORM: torch.ones(31)}), rf"{NORM} in .* float32\[31\]"),
    "integers": (lambda s: s.update({NORM: torch.ones(32, dtype=torch.int32)}), rf"{NORM} in .* int32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_weights_are_refused_by_name_and_leave_the_split_as_it_was(llama, tmp_path, case):
    whole, folder = llama
    change, text = WRONG[case]
    split = on_meta("llama")
    before = {name: id(p) for name, p in split.module.named_parameters()}
    with pytest.raises(FileError, match=f"SK507: .*{text}"):
        sk.load(split, changed(folder, tmp_path, change), "cpu", dtype=torch.float32)
    assert {name: id(p) for name, p in split.module.named_parameters()} == before
    model = sk.load(split, folder, "cpu")
    assert torch.equal(model(**inputs_of("llama")).logits, whole(**inputs_of("llama")).logits)


def test_a_file_that_ends_while_it_is_read_leaves_the_split_as_it_was(llama, tmp_path, monkeypatch):
    from splitkit.runtime.folder.tensorfiles import StoredTensor

    _, folder = llama
    split, real, count = on_meta("llama"), StoredTensor.read_into, []

    def fails(self, tensor):
        count.append(tensor)
        if len(count) == 5:
            raise FileError("SK504", "cannot read it: it ends too early")
        real(self, tensor)

    monkeypatch.setattr(StoredTensor, "read_into", fails)
    with pytest.raises(FileError, match="too early"):
        sk.load(split, folder, "cpu")
    assert all(p.is_meta for p in split.module.parameters()) and all(p.is_meta for p in split.flow.root.parameters())


def test_a_truncated_shard_is_refused_before_anything_is_read(saved, tmp_path):
    family, _, folder = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(FileError, match=f"SK505: {last.name}"):
        sk.load(on_meta(family), tmp_path, "cpu")


def test_a_tied_weight_with_two_values_is_refused(tmp_path):
    whole = model_of("gpt2")
    whole.save_pretrained(tmp_path / "own")
    wte = "transformer.wte.weight"
    same = changed(tmp_path / "own", tmp_path / "same", lambda s: s.update({"lm_head.weight": s[wte].clone()}))
    model = sk.load(on_meta("gpt2"), same, ["cpu:0", "cpu:1"])
    assert model.get_parameter("lm_head.weight") is model.get_parameter(wte)
    other = changed(tmp_path / "own", tmp_path / "other", lambda s: s.update({"lm_head.weight": s[wte] + 1}))
    with pytest.raises(FileError, match=r"SK507: .*(lm_head|wte).weight and .* differ"):
        sk.load(on_meta("gpt2"), other, "cpu")


def test_experts_must_be_all_there(tmp_path):
    model_of("mixtral").save_pretrained(tmp_path / "own")
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    fewer = changed(tmp_path / "own", tmp_path / "fewer", lambda s: s.pop(gone))
    with pytest.raises(FileError, match=r"SK507: .* has 3 tensors for the 4 of model.layers.1.mlp.experts.down_proj"):
        sk.load(on_meta("mixtral"), fewer, "cpu")
    gate = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    thin = changed(tmp_path / "own", tmp_path / "thin", lambda s: s.update({gate: s[gate][:-1].clone()}))
    with pytest.raises(FileError, match=rf"SK507: {gate} in"):
        sk.load(on_meta("mixtral"), thin, "cpu")


def test_a_conversion_that_is_not_known_is_refused(tmp_path, monkeypatch):
    """As if Mixtral's experts were transposed, too."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose

    model_of("mixtral").save_pretrained(tmp_path)
    steps = conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    steps[-1].operations.append(Transpose())
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", lambda kind: steps)
    with pytest.raises(FileError, match=r"SK507: .*which transformers converts \(MergeModulelist, Transpose\)"):
        sk.load(on_meta("mixtral"), tmp_path, "cpu")


def test_buffers_that_nothing_has_are_refused_and_real_ones_kept(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4)
            self.register_buffer("scale", torch.arange(4.0), persistent=False)

        def forward(self, x):
            return self.a(x * self.scale)

    whole, x = Scaled(), torch.ones(2, 4)
    write_tensors(tmp_path / "model.safetensors", whole.state_dict())
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(FileError, match="SK507: scale is on meta"):
        sk.load(sk.split(sk.capture(model, x), sk.policies.Stages(1)), tmp_path, "cpu")
    model.scale = torch.arange(4.0)
    loaded = sk.load(sk.split(sk.capture(model, x), sk.policies.Stages(1)), tmp_path / "model.safetensors", "cpu")
    assert torch.equal(loaded(x), whole(x)) and model.a.weight.is_meta and not model.scale.is_meta


def test_a_constant_of_a_graph_on_meta_is_refused(tmp_path):
    class Shifted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.tensor([1.0, 2, 3, 4], device=x.device)

    write_tensors(tmp_path / "model.safetensors", Shifted(4, 4).state_dict())
    gm = sk.capture(Shifted(4, 4, device="meta"), torch.ones(2, 4))
    with pytest.raises(FileError, match=r"SK507: lifted_tensor_0 is on meta(.|\n)*register_buffer"):
        sk.load(sk.split(gm, sk.policies.Stages(1)), tmp_path, "cpu")


def test_the_page_runs_as_shown(llama, group, tmp_path, monkeypatch):
    whole, _ = llama
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained(tmp_path / "llama")
    page = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.S)
    scope = {}
    exec(first, scope)
    half = copy.deepcopy(whole).bfloat16()
    assert torch.equal(scope["logits"], half(input_ids=scope["ids"]).logits)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(whole.config).bfloat16()
    gm = sk.capture(model, input_ids=scope["ids"], use_cache=False)
    scope["split"] = sk.split(gm, sk.policies.Stages(1))
    exec(second, scope)
    assert torch.equal(scope["pipe"].state_dict()["lm_head.weight"], half.lm_head.weight)


def test_wrong_arguments_are_refused(llama, tmp_path):
    _, folder = llama
    save_stages(on_meta("llama"), tmp_path)
    with pytest.raises(PipelineError, match=r"SK807: load was given a StageFolder(.|\n)*open_stages"):
        sk.load(open_stages(tmp_path), folder, "cpu")
    with pytest.raises(PipelineError, match=r"SK807: part 0 has no device(.|\n)*devices="):
        sk.load(on_meta("llama"), folder)
    with pytest.raises(FileError, match="SK504: .* holds no weights"):
        sk.load(on_meta("llama"), tmp_path / "none", "cpu")


def test_variants_have_other_file_names(llama, tmp_path):
    """As ``save_pretrained(variant="fp16")`` names them, in one file or several."""
    whole, _ = llama
    expected, wanted = whole.state_dict(), {name: [name] for name in whole.state_dict()}
    for folder, size in ((tmp_path / "one", "5GB"), (tmp_path / "several", "10KB")):
        whole.save_pretrained(folder, variant="fp16", max_shard_size=size)
        assert not (folder / "model.safetensors").exists() and any(folder.glob("*.fp16*"))
        index = folder / "model.safetensors.index.fp16.json"
        assert index.is_file() is (size == "10KB")
        for place in (folder, *([index] if index.is_file() else [])):
            found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            Weights.at(place).read([(wanted[name], tensor) for name, tensor in found.items()])
            assert all(map(torch.equal, found.values(), expected.values()))
    one = tmp_path / "one" / "model.fp16.safetensors"
    one.with_name("model.bf16.safetensors").write_bytes(one.read_bytes())
    with pytest.raises(FileError, match=r"SK504.*several weights: model.bf16.safetensors, model.fp16(.|\n)*Name one"):
        Weights.at(one.parent)
    assert {*Weights.at(one).files.values()} == {one}
    one.rename(one.with_name("model.safetensors"))
    assert {path.name for path in Weights.at(one.parent).files.values()} == {"model.safetensors"}


def test_a_model_with_data_gets_the_weights_of_the_file(llama):
    """Nothing needs `meta`: the tensors of the split are replaced, and the model stays as it is."""
    whole, folder = llama
    other = model_of("llama")
    with torch.no_grad():
        other.lm_head.weight.zero_()
    split = sk.split(sk.capture(other, **inputs_of("llama")), sk.policies.Stages(2))
    model = sk.load(split, folder, ["cpu:0", "cpu:1"])
    assert torch.equal(model(**inputs_of("llama")).logits, whole(**inputs_of("llama")).logits)
    assert not other.lm_head.weight.any()
