"""Build example models: randomly initialised ``transformers`` architectures, and models from users' factories."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from splitkit.errors import CaptureError, nearest
from splitkit.testing.config_files import is_config, require_transformers
from splitkit.testing.factory import Example, is_program, made_by, saved_program

__all__ = ["NAMES", "SIZES", "Example", "build", "load"]

Sizes = Mapping[str, int]


def _sizes(**sizes: int) -> Sizes:
    return MappingProxyType(sizes)


# gpt2, bert, t5 and vit have the sizes of the published small models; llama and mixtral fit on a laptop.
SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "gpt2": _sizes(layers=12, width=768, heads=12, vocab=50257, batch=2, seq=64),
        "llama": _sizes(layers=8, width=512, heads=8, vocab=32000, batch=2, seq=64),
        "bert": _sizes(layers=12, width=768, heads=12, vocab=30522, batch=2, seq=64),
        "t5": _sizes(layers=6, width=512, heads=8, vocab=32128, batch=2, seq=64),
        "vit": _sizes(layers=12, width=768, heads=12, image=224, patch=16, classes=1000, batch=2),
        "mixtral": _sizes(layers=4, width=256, heads=8, experts=4, vocab=8000, batch=2, seq=64),
    }
)
NAMES: tuple[str, ...] = tuple(SIZES)


def build(name: str, seed: int = 0, **sizes: int) -> Example:
    """Return the built-in example ``name``, with random weights and inputs drawn from ``seed``.

    The caller's RNG state is restored. Sizes that are not given are those of `SIZES`.

    Raises:
        CaptureError: SK402 if there is no such example or ``transformers`` is missing, SK403 for a size that the
            example does not have or accept.
    """
    if name not in SIZES:
        remedy = nearest(name, NAMES, f"Choose one of {', '.join(NAMES)}.")
        raise CaptureError("SK402", f"there is no example model {name!r}", remedy)
    unknown = [size for size in sizes if size not in SIZES[name]]
    if unknown:
        raise CaptureError(
            "SK403", f"{name} has no size {', '.join(unknown)}", f"Its sizes are {', '.join(SIZES[name])}."
        )
    wanted = dict(SIZES[name]) | sizes
    if wanted["width"] % wanted["heads"]:
        raise CaptureError(
            "SK403",
            f"{name}: width {wanted['width']} is not a multiple of heads {wanted['heads']}",
            "Choose heads that divide the width.",
        )
    transformers = require_transformers("the example models need")
    import torch

    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model, kwargs = _BUILDERS[name](transformers, wanted)
    return Example(model.train(), (), kwargs)


def load(spec: str, mesh: Any = None, /, **sizes: int) -> Example:
    """Return the example named ``"gpt2"`` ..., ``"package.module:factory"`` or ``"path/to/file.py:factory"``.

    It may also be a ``config.json`` of transformers or its folder, with the sizes ``batch`` and ``seq``, or a ``.pt2``
    file of ``torch.export.save``, with the inputs that the program was exported with.
    A factory takes ``sizes`` as keywords and returns ``(module, args)``, ``(module, args, kwargs)``,
    ``(module, kwargs)`` or an `Example`, where ``args`` is a tuple (or one tensor) and ``kwargs`` a dict. Errors
    that it raises have a note with the line of its file. ``mesh``, a mesh of torch's,
    goes to its parameter of that name.

    Raises:
        CaptureError: SK402 for a name that is not an example, or a package that is not installed; SK403 for a factory
            that is missing, cannot be called with these sizes, or returns something else.
    """
    if is_config(spec):
        from splitkit.testing.config_models import config_example

        return config_example(spec, **sizes)
    if is_program(spec):
        return saved_program(spec, sizes)
    return made_by(spec, sizes, mesh) if ":" in spec else build(spec, **sizes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which comments on small vocabularies and on configurations without a checkpoint."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


Built = tuple[Any, dict[str, Any]]


def _tokens(s: Sizes) -> Any:
    import torch

    return torch.randint(0, s["vocab"], (s["batch"], s["seq"]))


def _gpt2(hf: Any, s: Sizes) -> Built:
    config = hf.GPT2Config(
        n_layer=s["layers"], n_embd=s["width"], n_head=s["heads"], vocab_size=s["vocab"],
        n_positions=max(1024, s["seq"]), bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = _tokens(s)
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers 5 does not derive it from the class name, and warns in forward
    return model, {"input_ids": ids, "labels": ids.clone()}


def _llama(hf: Any, s: Sizes) -> Built:
    config = hf.LlamaConfig(
        num_hidden_layers=s["layers"], hidden_size=s["width"], intermediate_size=_gated(s["width"]),
        num_attention_heads=s["heads"], num_key_value_heads=s["heads"], vocab_size=s["vocab"],
        max_position_embeddings=max(2048, s["seq"]), bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = _tokens(s)
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def _bert(hf: Any, s: Sizes) -> Built:
    import torch

    config = hf.BertConfig(
        num_hidden_layers=s["layers"], hidden_size=s["width"], intermediate_size=4 * s["width"],
        num_attention_heads=s["heads"], vocab_size=s["vocab"], max_position_embeddings=max(512, s["seq"]),
    )  # fmt: skip
    ids = _tokens(s)
    return hf.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _t5(hf: Any, s: Sizes) -> Built:
    config = hf.T5Config(
        num_layers=s["layers"], num_decoder_layers=s["layers"], d_model=s["width"], d_ff=4 * s["width"],
        num_heads=s["heads"], d_kv=s["width"] // s["heads"], vocab_size=s["vocab"], use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), {"input_ids": _tokens(s), "labels": _tokens(s)}


def _vit(hf: Any, s: Sizes) -> Built:
    import torch

    config = hf.ViTConfig(
        num_hidden_layers=s["layers"], hidden_size=s["width"], intermediate_size=4 * s["width"],
        num_attention_heads=s["heads"], image_size=s["image"], patch_size=s["patch"], num_labels=s["classes"],
        problem_type="single_label_classification",
    )  # fmt: skip
    pixels = torch.randn(s["batch"], 3, s["image"], s["image"])
    return hf.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.randint(0, s["classes"], (s["batch"],)),
    }


def _mixtral(hf: Any, s: Sizes) -> Built:
    config = hf.MixtralConfig(
        num_hidden_layers=s["layers"], hidden_size=s["width"], intermediate_size=_gated(s["width"]),
        num_attention_heads=s["heads"], num_key_value_heads=s["heads"], vocab_size=s["vocab"],
        num_local_experts=s["experts"], num_experts_per_tok=min(2, s["experts"]), sliding_window=None,
        max_position_embeddings=max(2048, s["seq"]), bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = _tokens(s)
    return hf.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def _gated(width: int) -> int:
    """Return the usual inner width of a gated MLP: 8/3 of the width, rounded up to a multiple of 32."""
    return -(-8 * width // 3 // 32) * 32


_BUILDERS: Mapping[str, Callable[[Any, Sizes], Built]] = MappingProxyType(
    {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5, "vit": _vit, "mixtral": _mixtral}
)
