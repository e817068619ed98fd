"""The names of the formats and what each writes, without torch: for the command line and its help."""

from __future__ import annotations

from collections.abc import Mapping

WRITES: Mapping[str, str] = {
    "torch": "split points for torch.distributed.pipelining.pipeline(), and a schedule CSV",
    "torchtitan": "module_fqns_per_model_part, the memory policy, and a schedule CSV",
    "megatron": "--pipeline-model-parallel-layout and the recompute flags",
    "deepspeed": "a PipelineModule with these borders",
    "accelerate": "a device_map",
    "transformers": "a device_map for from_pretrained",
    "vllm": "VLLM_PP_LAYER_PARTITION",
    "sglang": "SGLANG_PP_LAYER_PARTITION",
    "galvatron": "the JSON of a hybrid parallel configuration",
    "nnscaler": "pipeline_pivots and the other fields of pas_config",
    "onnx": "a pipeline stage for each node (IR version 11)",
}
