"""Architectures of ``transformers`` that see, hear, read tables, or several of these: a line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from zoo_models import Row
from zoo_transformers import SIZES, TEXT, Inputs, boxes, classes, hf, ids, masked

VISION: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SPEECH: Mapping[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (16, 16, 16), "conv_stride": (5, 4, 2), "conv_kernel": (10, 4, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "layerdrop": 0.0, "classifier_proj_size": 16,
}  # fmt: skip


def image(config: Any, training: bool, size: int = 32) -> dict[str, Any]:
    """A label a picture."""
    found: dict[str, Any] = {"pixel_values": torch.randn(2, 3, size, size)}
    return found | {"labels": torch.tensor([0, 1])} if training else found


def image64(config: Any, training: bool) -> dict[str, Any]:
    """Larger pictures, for those that halve them five times."""
    return image(config, training, 64)


def picture(config: Any, training: bool) -> dict[str, Any]:
    """No labels: the loss is of the outputs."""
    return image(config, False)


def segmentation(config: Any, training: bool, size: int = 32) -> dict[str, Any]:
    """A label a pixel."""
    found: dict[str, Any] = {"pixel_values": torch.randn(2, 3, size, size)}
    return found | {"labels": torch.randint(0, 2, (2, size, size))} if training else found


def detection(config: Any, training: bool) -> dict[str, Any]:
    """A list of labels: one dict a picture."""
    found: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 64, 64)}
    one = {"class_labels": torch.tensor([0, 1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.4, 0.1, 0.2]])}
    return found | {"labels": [one, {k: v.clone() for k, v in one.items()}]} if training else found


def wave(config: Any, training: bool) -> dict[str, Any]:
    """A label a sound."""
    found: dict[str, Any] = {"input_values": torch.randn(2, 2000)}
    return found | {"labels": torch.tensor([0, 1])} if training else found


def speech(config: Any, training: bool) -> dict[str, Any]:
    """A sound and what is said in it."""
    found: dict[str, Any] = {"input_values": torch.randn(2, 2000)}
    return found | {"labels": ids(config.vocab_size, 2, 6)} if training else found


def caption(config: Any, training: bool) -> dict[str, Any]:
    """A text and a picture that belong together; to train, with the loss that compares them."""
    text = getattr(config, "text_config", config)
    found: dict[str, Any] = {**masked(text, False), "pixel_values": torch.randn(2, 3, 32, 32)}
    return found | {"return_loss": True} if training else found


def chat(image_tokens: int, **sizes: int) -> Inputs:
    """A prompt with places for a picture."""

    def inputs(config: Any, training: bool) -> dict[str, Any]:
        tokens = ids(config.text_config.vocab_size - 10, 2, 8 + image_tokens)
        tokens[:, 2 : 2 + image_tokens] = getattr(config, "image_token_id", None) or config.image_token_index
        size = sizes.get("size", 32)
        found: dict[str, Any] = {
            "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
            "pixel_values": torch.randn(2, 3, size, size),
        }  # fmt: skip
        return found | {"labels": tokens} if training else found

    return inputs


def several(text: str, vision: str, whole: str, text_sizes: Mapping[str, Any] = SIZES, **sizes: Any) -> Any:
    """A configuration made of one for texts and one for pictures."""

    def make(transformers: Any) -> Any:
        reads, sees = getattr(transformers, text)(**text_sizes), getattr(transformers, vision)(**VISION)
        return getattr(transformers, whole)(text_config=reads, vision_config=sees, **sizes)

    return make


def series(config: Any, training: bool) -> dict[str, Any]:
    """Values of the past, the hours that they are of, and of the future the same."""
    past = config.context_length + max(config.lags_sequence)
    found = {
        "past_values": torch.rand(2, past), "past_time_features": torch.randn(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
    }  # fmt: skip
    length = config.prediction_length
    return found | {
        "future_values": torch.rand(2, length), "future_time_features": torch.randn(2, length, config.num_time_features)
    }  # fmt: skip


def patches(config: Any, training: bool) -> dict[str, Any]:
    """Several channels, past and future."""
    found = {"past_values": torch.randn(2, config.context_length, 3)}
    return found | {"future_values": torch.randn(2, config.prediction_length, 3)} if training else found


def trajectory(config: Any, training: bool) -> dict[str, Any]:
    """States, actions and rewards."""
    return {
        "states": torch.randn(2, 6, config.state_dim), "actions": torch.randn(2, 6, config.act_dim),
        "rewards": torch.randn(2, 6, 1), "returns_to_go": torch.randn(2, 6, 1),
        "timesteps": torch.arange(6).repeat(2, 1), "attention_mask": torch.ones(2, 6),
    }  # fmt: skip


def heard(name: str, *shape: int) -> Inputs:
    """Features of a sound and what is said in it."""

    def inputs(config: Any, training: bool) -> dict[str, Any]:
        text = ids(config.vocab_size, 2, 6)
        return {name: torch.randn(shape), **({"labels": text} if training else {"decoder_input_ids": text})}

    return inputs


def seen_words(config: Any, training: bool) -> dict[str, Any]:
    """A question about a picture."""
    found = {**masked(config, False), "pixel_values": torch.randn(2, 3, 32, 32)}
    return found | {"labels": torch.rand(2, config.num_labels)} if training else found


def regions(config: Any, training: bool) -> dict[str, Any]:
    """A text and what a detector saw."""
    found = {
        **masked(config, False), "visual_embeds": torch.randn(2, 4, config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(2, 4), "visual_token_type_ids": torch.ones(2, 4, dtype=torch.long),
    }  # fmt: skip
    return found | {"labels": torch.tensor([0, 1])} if training else found


def looked_up(config: Any, training: bool) -> dict[str, Any]:
    """A text, and boxes of a picture with what is in them."""
    return {
        **masked(config, False), "visual_feats": torch.randn(2, 4, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 4, config.visual_pos_dim),
    }  # fmt: skip


def told(config: Any, training: bool) -> dict[str, Any]:
    """A picture and its caption."""
    tokens = ids(config.decoder.vocab_size, 2, 8)
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels" if training else "decoder_input_ids": tokens}


def described(config: Any, training: bool) -> dict[str, Any]:
    """A caption, the text of which is the label too."""
    tokens = ids(config.vocab_size)
    found = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 32, 32)}
    return found | {"labels": tokens} if training else found


def described_blip(config: Any, training: bool) -> dict[str, Any]:
    """A picture, and the words that it starts with or is trained to say."""
    return described(config.text_config, training)


def vit_and_gpt(transformers: Any) -> Any:
    """A picture is read by one, the caption written by the other."""
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VISION), transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96),
        decoder_start_token_id=1, pad_token_id=0,
    )  # fmt: skip


def idefics(config: Any, training: bool) -> dict[str, Any]:
    """A prompt with a picture, one of several that a prompt may have."""
    found = chat(4)(config, training)
    return found | {"pixel_values": torch.randn(2, 1, 3, 32, 32)}


def clipseg(config: Any, training: bool) -> dict[str, Any]:
    """Where in the picture the text is."""
    found = caption(config, False)
    return found | {"labels": torch.rand(2, 32, 32)} if training else found


def paged(config: Any, training: bool) -> dict[str, Any]:
    """Words, where they stand, and the page."""
    return {**boxes(config, training), "pixel_values": torch.randn(2, 3, 32, 32)}


TIMES: Mapping[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
STAGES_OF_4: Mapping[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
SWIN: Mapping[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4
}  # fmt: skip

# fmt: off
ROWS: list[Row] = [
    *(hf("vision", f"{name}ForImageClassification", take, None, **sizes) for name, take, sizes in (
        ("Swin", image, SWIN), ("Swinv2", image, SWIN), ("ConvNext", image64, STAGES_OF_4),
        ("ConvNextV2", image64, STAGES_OF_4), ("DeiT", image, VISION), ("Beit", image, VISION),
        ("Data2VecVision", image, VISION), ("Dinov2", image, VISION), ("ViTMSN", image, VISION),
        ("Dinov2WithRegisters", image, VISION), ("IJepa", image, VISION),
        ("ResNet", image64, STAGES_OF_4 | {"embedding_size": 8, "layer_type": "basic"}),
        ("RegNet", image64, STAGES_OF_4 | {"embedding_size": 8, "groups_width": 8}),
        ("Bit", image64, STAGES_OF_4 | {"embedding_size": 8, "num_groups": 4}),
        ("PoolFormer", image64, STAGES_OF_4), ("MobileNetV1", image64, {"depth_multiplier": 0.25}),
        ("MobileNetV2", image64, {"depth_multiplier": 0.25}),
        ("MobileViT", image64, {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
                                "num_attention_heads": 4, "image_size": 64}),
        ("EfficientNet", image64, {"width_coefficient": 0.25, "depth_coefficient": 0.5, "image_size": 64,
                                   "hidden_dim": 320, "depth_divisor": 8}),
        ("Pvt", image, {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
                        "image_size": 32}),
        ("PvtV2", image64, {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                            "num_attention_heads": [1, 2, 2, 4], "image_size": 64}),
        ("Cvt", image64, {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}),
        ("Levit", image64, {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 4],
                            "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
        ("FocalNet", image, {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
                             "focal_levels": [2, 2], "focal_windows": [3, 3]}),
        ("SwiftFormer", image64, {"embed_dims": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 64}),
        ("Hiera", image64, {"embed_dim": 16, "image_size": [64, 64], "depths": [1, 1, 1], "num_heads": [1, 2, 4],
                            "num_query_pool": 2, "patch_stride": [4, 4], "masked_unit_size": [4, 4]}),
    )),
    hf("vision", "ViTMAEForPreTraining", picture, VISION, decoder_hidden_size=32, decoder_num_hidden_layers=1,
       decoder_num_attention_heads=4, decoder_intermediate_size=64),
    hf("vision", "SegformerForSemanticSegmentation", segmentation, None, hidden_sizes=[8, 16, 16, 32],
       depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
    hf("vision", "MobileViTV2ForSemanticSegmentation", lambda c, t: segmentation(c, t, 64), None,
       width_multiplier=0.25, image_size=64),
    hf("vision", "DPTForSemanticSegmentation", segmentation, VISION | {"num_hidden_layers": 4}, is_hybrid=False,
       backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16),
    hf("vision", "GLPNForDepthEstimation", picture, None, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
       num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
    hf("vision", "YolosForObjectDetection", detection, VISION | {"image_size": [64, 64]}, num_detection_tokens=6),
    hf("vision", "DetrForObjectDetection", detection, make=lambda t: t.DetrConfig(
        backbone_config=t.ResNetConfig(**STAGES_OF_4, embedding_size=8, layer_type="basic", out_features=["stage4"]),
        use_timm_backbone=False, backbone=None, d_model=32, encoder_layers=1, decoder_layers=1, num_queries=6,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)),
    hf("vision", "UperNetForSemanticSegmentation", lambda c, t: segmentation(c, t, 64), make=lambda t: t.UperNetConfig(
        backbone_config=t.ConvNextConfig(**STAGES_OF_4, out_features=["stage1", "stage2", "stage3", "stage4"]),
        hidden_size=16, auxiliary_in_channels=16, auxiliary_channels=16, pool_scales=[1, 2])),
    hf("vision", "Swin2SRForImageSuperResolution", picture, None, image_size=32, embed_dim=16, depths=[1, 1],
       num_heads=[2, 2], window_size=4),
    hf("vision", "ImageGPTForImageClassification", lambda c, t: classes(c, t) if t else masked(c, t), None, n_embd=32,
       n_layer=2, n_head=4, n_positions=64, vocab_size=97),
    *(hf("audio", f"{name}ForSequenceClassification", wave, SPEECH) for name in (
        "Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "WavLM", "SEW", "SEWD", "Data2VecAudio")),
    hf("audio", "Wav2Vec2ConformerForCTC", speech, SPEECH),
    hf("audio", "Wav2Vec2BertForCTC", lambda c, t: {"input_features": torch.randn(2, 24, 16), **(
        {"labels": ids(c.vocab_size, 2, 6)} if t else {})}, SPEECH, feature_projection_input_dim=16, add_adapter=False),
    hf("audio", "ASTForAudioClassification", lambda c, t: {"input_values": torch.randn(2, 32, 16), **(
        {"labels": torch.tensor([0, 1])} if t else {})}, VISION, max_length=32, num_mel_bins=16),
    hf("audio", "WhisperForConditionalGeneration", heard("input_features", 2, 16, 48), None, vocab_size=96, d_model=32,
       encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
       decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=24, max_target_positions=32, pad_token_id=0,
       bos_token_id=1, eos_token_id=2, decoder_start_token_id=3),
    hf("audio", "Speech2TextForConditionalGeneration", heard("input_features", 2, 48, 16), None, vocab_size=96,
       d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
       encoder_ffn_dim=64, decoder_ffn_dim=64, input_feat_per_channel=16, conv_channels=16, max_source_positions=64,
       max_target_positions=32, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    hf("audio", "MoonshineForConditionalGeneration", heard("input_values", 2, 4000), None, vocab_size=96,
       hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
       encoder_num_attention_heads=4, decoder_num_attention_heads=4, decoder_start_token_id=1, pad_token_id=2),
    hf("audio", "EncodecModel", lambda c, t: {"input_values": torch.randn(2, 1, 640)}, None, hidden_size=16,
       num_filters=4, codebook_size=32, codebook_dim=16, num_lstm_layers=1, upsampling_ratios=[4, 2]),
    hf("audio", "UnivNetModel", lambda c, t: {"input_features": torch.randn(2, 8, 16)}, None, num_mel_bins=16,
       model_in_channels=8, model_hidden_channels=8, kernel_predictor_hidden_channels=8),
    hf("multimodal", "CLIPModel", caption, make=several("CLIPTextConfig", "CLIPVisionConfig", "CLIPConfig", TEXT)),
    *(hf("multimodal", f"{name}Model", caption, make=several(
        f"{name}TextConfig", f"{name}VisionConfig", f"{name}Config", TEXT))
      for name in ("Siglip", "AltCLIP", "ChineseCLIP")),
    hf("multimodal", "GroupViTModel", caption, make=lambda t: t.GroupViTConfig(
        text_config=t.GroupViTTextConfig(**TEXT), vision_config=t.GroupViTVisionConfig(
            **VISION | {"patch_size": 4}, depths=[1, 1, 1], num_group_tokens=[8, 4, 0], num_output_groups=[8, 4, 0]))),
    hf("multimodal", "BlipForConditionalGeneration", described_blip, make=several(
        "BlipTextConfig", "BlipVisionConfig", "BlipConfig", TEXT | {"encoder_hidden_size": 32})),
    hf("multimodal", "ViltForQuestionAnswering", seen_words, TEXT | VISION, num_labels=5),
    hf("multimodal", "VisualBertForVisualReasoning", regions, TEXT, visual_embedding_dim=16),
    hf("multimodal", "LxmertModel", looked_up, TEXT, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16),
    hf("multimodal", "GitForCausalLM", described, make=lambda t: t.GitConfig(
        vision_config=VISION, **TEXT)),
    hf("multimodal", "VisionEncoderDecoderModel", told, make=vit_and_gpt),
    hf("multimodal", "LlavaForConditionalGeneration", chat(16), make=several(
        "LlamaConfig", "CLIPVisionConfig", "LlavaConfig", image_token_id=90, vision_feature_layer=-1)),
    hf("multimodal", "PaliGemmaForConditionalGeneration", chat(16), make=several(
        "GemmaConfig", "SiglipVisionConfig", "PaliGemmaConfig", SIZES | {"head_dim": 8}, image_token_id=90,
        projection_dim=32)),
    hf("multimodal", "Idefics3ForConditionalGeneration", idefics, make=several(
        "LlamaConfig", "Idefics3VisionConfig", "Idefics3Config", image_token_id=90, scale_factor=2)),
    hf("multimodal", "CLIPSegForImageSegmentation", clipseg, make=several(
        "CLIPSegTextConfig", "CLIPSegVisionConfig", "CLIPSegConfig", TEXT | {"num_hidden_layers": 2},
        extract_layers=[0, 1], reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32,
        projection_dim=16)),
    hf("multimodal", "LayoutLMv3ForTokenClassification", paged, TEXT, coordinate_size=6, shape_size=4, input_size=32,
       patch_size=8, max_2d_position_embeddings=128, rel_2d_pos_bins=8, rel_pos_bins=8, max_rel_pos=16,
       max_rel_2d_pos=16),
    hf("time series", "TimeSeriesTransformerForPrediction", series, TIMES, d_model=16),
    hf("time series", "InformerForPrediction", series, TIMES, d_model=16),
    hf("time series", "AutoformerForPrediction", series, TIMES, d_model=16, label_length=4, moving_average=3),
    hf("time series", "PatchTSTForPrediction", patches, None, num_input_channels=3, context_length=16, patch_length=4,
       patch_stride=4, prediction_length=4, d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32),
    hf("time series", "PatchTSMixerForPrediction", patches, None, num_input_channels=3, context_length=16,
       patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_layers=2),
    hf("time series", "DecisionTransformerModel", trajectory, None, state_dim=5, act_dim=3, hidden_size=32, n_layer=2,
       n_head=4, max_ep_len=16),
]
