"""Architectures of diffusers, timm and PyTorch Geometric: a line each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Row


def noised(*shape: int, **others: Any) -> Any:
    """A noised picture, and how noisy it is."""
    return lambda: (
        {"sample": torch.randn(shape), "timestep": torch.tensor([3, 7])}
        | {name: make() for name, make in others.items()}
    )


def latent(*shape: int, **others: Any) -> Any:
    """The same, as transformers call it."""

    def inputs() -> dict[str, Any]:
        found: dict[str, Any] = {"hidden_states": torch.randn(shape), "timestep": torch.tensor([3, 7])}
        return found | {name: make() for name, make in others.items()}

    return inputs


def normal(*shape: int) -> Any:
    """Drawn when the inputs are."""
    return lambda: torch.randn(shape)


def labels() -> Tensor:
    """Two classes."""
    return torch.tensor([0, 1])


def diffuser(name: str, inputs: Any, **sizes: Any) -> Row:
    """Any class of models of diffusers."""

    def make(training: bool) -> tuple[nn.Module, Mapping[str, Any]]:
        return getattr(importlib.import_module("diffusers"), name)(**sizes), inputs()

    return Row(name, "diffusers", "diffusers", make)


def timm(name: str, size: int = 64, **sizes: Any) -> Row:
    """A network of timm for small pictures."""

    def make(training: bool) -> tuple[nn.Module, Mapping[str, Any]]:
        model = importlib.import_module("timm").create_model(name, num_classes=10, **sizes)
        return model, {"x": torch.randn(2, 3, size, size)}

    return Row(name, "timm", "timm", make)


def ring(channels: int = 8, nodes: int = 12) -> dict[str, Tensor]:
    """A ring of nodes with a few chords."""
    here = torch.arange(nodes)
    others = torch.cat([here + 1, here - 1, here[::3] + 5]) % nodes
    return {"x": torch.randn(nodes, channels), "edge_index": torch.stack([torch.cat([here, here, here[::3]]), others])}


def graph_net(name: str, inputs: Any = ring, **sizes: Any) -> Row:
    """A model of PyTorch Geometric."""

    def make(training: bool) -> tuple[nn.Module, Mapping[str, Any]]:
        return getattr(importlib.import_module("torch_geometric.nn"), name)(**sizes), inputs()

    return Row(f"PyG {name}", "graphs", "torch_geometric", make)


UNET: Mapping[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16
}  # fmt: skip
DIT: Mapping[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
GNN: Mapping[str, Any] = {"in_channels": 8, "hidden_channels": 16, "num_layers": 2, "out_channels": 4}
TEXTS = normal(2, 6, 16)

# fmt: off
ROWS: list[Row] = [
    diffuser("UNet2DModel", noised(2, 3, 16, 16), **UNET, in_channels=3, out_channels=3, attention_head_dim=4,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    diffuser("UNet2DConditionModel", noised(2, 4, 16, 16, encoder_hidden_states=TEXTS), **UNET, cross_attention_dim=16,
             attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
             up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    diffuser("UNet1DModel", noised(2, 2, 32), sample_size=32, in_channels=2, out_channels=2, extra_in_channels=64,
             block_out_channels=(32, 32), down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
             up_block_types=("UpBlock1D", "UpBlock1DNoSkip"), norm_num_groups=4),
    diffuser("UNet3DConditionModel", noised(2, 4, 4, 16, 16, encoder_hidden_states=TEXTS), block_out_channels=(8, 16),
             layers_per_block=1, norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
             down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
             up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
    diffuser("UVit2DModel", lambda: {
        "input_ids": torch.randint(0, 30, (2, 8, 8)), "encoder_hidden_states": torch.randn(2, 6, 16),
        "pooled_text_emb": torch.randn(2, 16), "micro_conds": torch.rand(2, 2)}, hidden_size=16, cond_embed_dim=16,
        micro_cond_encode_dim=4, micro_cond_embed_dim=8, encoder_hidden_size=16, vocab_size=32, codebook_size=31,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, in_channels=16, block_out_channels=16,
        block_num_heads=2, sample_size=8),
    diffuser("ControlNetModel", noised(
             2, 4, 16, 16, encoder_hidden_states=TEXTS, controlnet_cond=normal(2, 3, 128, 128)),
             block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
             attention_head_dim=2, conditioning_embedding_out_channels=(4, 8, 8, 16),
             down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")),
    diffuser("AutoencoderKL", lambda: {"sample": torch.randn(2, 3, 16, 16)}, **UNET,
             down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    diffuser("AutoencoderTiny", lambda: {"sample": torch.randn(2, 3, 16, 16)}, encoder_block_out_channels=(8, 8),
             decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
    diffuser("AsymmetricAutoencoderKL", lambda: {"sample": torch.randn(2, 3, 16, 16)},
             down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
             down_block_out_channels=(8, 16), up_block_out_channels=(8, 16), norm_num_groups=4, sample_size=16),
    diffuser("AutoencoderDC", lambda: {"sample": torch.randn(2, 3, 16, 16)}, latent_channels=4,
             attention_head_dim=4, encoder_block_types=("ResBlock", "EfficientViTBlock"),
             decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
             decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
             encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), downsample_block_type="conv"),
    diffuser("VQModel", lambda: {"sample": torch.randn(2, 3, 16, 16)}, **UNET, num_vq_embeddings=32,
             down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    diffuser("DiTTransformer2DModel", latent(2, 4, 8, 8, class_labels=labels), **DIT, in_channels=4, sample_size=8,
             norm_num_groups=4, num_embeds_ada_norm=8),
    diffuser("Transformer2DModel", lambda: {"hidden_states": torch.randn(2, 16, 8, 8)}, **DIT, in_channels=16,
             norm_num_groups=4),
    diffuser("PixArtTransformer2DModel", latent(2, 4, 8, 8, encoder_hidden_states=TEXTS, added_cond_kwargs=lambda: {
        "resolution": None, "aspect_ratio": None}), **DIT, in_channels=4, sample_size=8, cross_attention_dim=16,
        caption_channels=16, use_additional_conditions=False),
    diffuser("SD3Transformer2DModel", latent(2, 4, 8, 8, encoder_hidden_states=TEXTS, pooled_projections=normal(2, 16)),
             **DIT, sample_size=8, patch_size=1, in_channels=4, joint_attention_dim=16, caption_projection_dim=16,
             pooled_projection_dim=16, out_channels=4),
    diffuser("FluxTransformer2DModel", latent(
        2, 16, 4, encoder_hidden_states=TEXTS, pooled_projections=normal(2, 16), img_ids=lambda: torch.zeros(16, 3),
        txt_ids=lambda: torch.zeros(6, 3)), patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8)),
    diffuser("AuraFlowTransformer2DModel", latent(2, 4, 8, 8, encoder_hidden_states=TEXTS), sample_size=8,
             in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2,
             joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=32),
    diffuser("SanaTransformer2DModel", latent(2, 4, 8, 8, encoder_hidden_states=TEXTS), **DIT,
             in_channels=4, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=8,
             cross_attention_dim=16, caption_channels=16, sample_size=8),
    diffuser("CogVideoXTransformer3DModel", latent(2, 2, 4, 8, 8, encoder_hidden_states=normal(2, 6, 16)), **DIT,
             in_channels=4, out_channels=4, text_embed_dim=16, sample_width=8, sample_height=8, sample_frames=5,
             max_text_seq_length=6, time_embed_dim=8),
    diffuser("LTXVideoTransformer3DModel", latent(
        2, 16, 4, encoder_hidden_states=TEXTS, encoder_attention_mask=lambda: torch.ones(2, 6),
        num_frames=lambda: 1, height=lambda: 4, width=lambda: 4), in_channels=4, out_channels=4, **DIT,
        cross_attention_dim=16, caption_channels=16),
    diffuser("PriorTransformer", lambda: {
        "hidden_states": torch.randn(2, 16), "timestep": torch.tensor([3, 7]), "proj_embedding": torch.randn(2, 16),
        "encoder_hidden_states": torch.randn(2, 6, 16)}, **DIT, embedding_dim=16, num_embeddings=6),
    *(timm(name) for name in (
        "resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "regnetx_002", "ghostnet_050", "convnext_atto",
        "repvgg_a0", "lcnet_050", "tinynet_e", "mobileone_s0", "fastvit_t8", "edgenext_xx_small",
        "densenet121", "dla46_c", "hrnet_w18_small", "res2net50_14w_8s", "poolformer_s12", "starnet_s1")),
    *(timm(name, img_size=64) for name in ("mixer_s32_224", "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
                                           "deit_tiny_patch16_224")),
    *(graph_net(name, **GNN) for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")),
    graph_net("GraphUNet", in_channels=8, hidden_channels=16, out_channels=4, depth=2),
    graph_net("LightGCN", lambda: {"edge_index": ring()["edge_index"]}, num_nodes=12, embedding_dim=8,
              num_layers=2),
    graph_net("MLP", lambda: {"x": torch.randn(12, 8)}, in_channels=8, hidden_channels=16, out_channels=4,
              num_layers=3),
    graph_net("TransformerConv", in_channels=8, out_channels=4, heads=2),
    graph_net("GATv2Conv", in_channels=8, out_channels=4, heads=2),
    graph_net("ChebConv", in_channels=8, out_channels=4, K=3),
    graph_net("ARMAConv", in_channels=8, out_channels=4, num_stacks=2),
    graph_net("ResGatedGraphConv", in_channels=8, out_channels=4),
]
