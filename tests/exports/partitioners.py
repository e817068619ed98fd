"""``get_pp_indices`` of vLLM and SGLang, as read, where their packages do not install.

vLLM: vllm-project/vllm, ``vllm/distributed/utils.py``, Copyright 2023 The vLLM team; SGLang: sgl-project/sglang,
``python/sglang/srt/distributed/utils.py`` at 1107be1, adapted from it. Both Apache-2.0. Only the branch that reads the
environment variable is copied; for layers without it both would divide evenly.
"""

from __future__ import annotations


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int, partition_list_str: str) -> tuple[int, int]:
    try:
        partitions = [int(layer) for layer in partition_list_str.split(",")]
    except ValueError as err:
        raise ValueError(f"Invalid partition string: {partition_list_str}") from err
    if len(partitions) != pp_size:
        raise ValueError(f"{len(partitions)=} does not match {pp_size=}.")
    if sum(partitions) != num_hidden_layers:
        raise ValueError(f"{sum(partitions)=} does not match {num_hidden_layers=}.")
    start_layer = sum(partitions[:pp_rank])
    end_layer = start_layer + partitions[pp_rank]
    return (start_layer, end_layer)
