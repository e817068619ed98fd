"""One process: generates on devices of the simulated accelerator and on the CPU; a JSON line for each family."""

from __future__ import annotations

import copy
import json
import sys

import simgpu
import torch
from decoders import IMAGE, captured, decoder

import splitkit as sk

DEVICES = ["simgpu:0", "simgpu:1"]


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    if family != "t5":
        mask = mask.flip(1)
    if family != "llava":
        return {"input_ids": ids * mask, "attention_mask": mask}
    ids[:, 4:8] = IMAGE
    return {"input_ids": ids * mask, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 16, 16)}


def generated(family: str) -> dict[str, object]:
    """Tokens of the CPU and of the devices, where the caches are, and races of streams."""
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    given = inputs_of(family)
    want = decoder(family).generate(**given, **options)
    simgpu.races()
    # the copy shares nothing with the model above
    model, gm = copy.deepcopy((decoder(family), captured(family)))
    split = sk.split(gm, sk.policies.Stages(2))
    generator = sk.generator(model, split, DEVICES)
    if family in ("t5", "llava"):
        given = {name: tensor.to(generator.device) for name, tensor in given.items()}
    got = generator.generate(**given, **options)
    cache = got.get("past_key_values") or got.cache_params
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if family == "t5" else [cache]
    return {
        "same": torch.equal(want.sequences, got.sequences.cpu()),
        "devices": [[str(layer.device) for layer in cache.layers] for cache in caches],
        "races": simgpu.races(),
    }


def main() -> None:
    simgpu.register()
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        print(json.dumps({"family": name, **generated(name)}), flush=True)


if __name__ == "__main__":
    main()
