"""Stages for inference beside the rules of other tools: the tokens of cache that fit. ``--json`` for machines.

For each model and list of cards, the tokens for which ``Stages(n, objective="tokens")`` has room, and those of `rules`,
judged alike: weights and activations of the captured forward (512 tokens of one request), by true peaks, in bfloat16;
the weights are on the meta device. "-": the weights alone do not fit.

``vllm#6920`` (https://github.com/vllm-project/vllm/pull/6920): Llama-3-70B on 8 L4, 80 layers. Even layers: 1,476
blocks of 16 tokens, 244.53 s; fewer layers on the first and the last rank: 3,078 blocks, 167.68 s, 1.46 times as fast.
Blocks are computed here for 0.9 of the memory and a cache of two bytes per number, once for weights of one byte (FP8)
and once of two. With one byte the cards would have room for ten times the published blocks, so the run seems to have
held more than that. Two numbers that were not published, the bytes that each rank and the last rank hold besides, are
fitted to the two that were (``fitted``): what follows from them for other partitions is a prediction. Seconds are by
the roofline: prompts as fast as the slowest rank computes, and a token of each request in flight in the time that the
slowest rank reads its weights and cache, once for each of the 8 groups of requests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rules import SERVING, accelerate_within
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen2Config

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.extend import cache_bytes
from splitkit.pipeline.memory import cache_room
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.units import read_size

LENGTH = 512
MODELS: dict[str, tuple[PretrainedConfig, list[list[str]]]] = {
    "Llama-3-8B": (
        LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256,
        ),
        [["12GB"] * 2, ["12GB", "8GB"], ["8GB"] * 3, ["24GB", "8GB"]],
    ),
    "Qwen2-7B": (
        Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, vocab_size=152064,
        ),
        [["12GB"] * 2, ["8GB", "12GB"], ["8GB"] * 3],
    ),
    "Mixtral-8x7B": (
        MixtralConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=32000, num_local_experts=8,
        ),
        [["48GB"] * 2, ["24GB"] * 5, ["48GB", "24GB", "24GB", "24GB"]],
    ),
}  # fmt: skip


def captured(config: PretrainedConfig) -> tuple[torch.nn.Module, torch.fx.GraphModule]:
    """A model and its graph, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    return model, sk.capture(model, input_ids=ids, use_cache=False)


def room(prices: StagePrices, plan: Plan, limits: Sequence[int]) -> int:
    """The tokens for which a plan has room; it may leave cards empty."""
    held = [0] * len(limits)
    for node, nbytes in cache_bytes(prices.flow).items():
        held[plan.home(node)] += nbytes
    used = run_order(prices.flow, plan)
    return min(cache_room(prices.of(plan), [held[card] for card in used], [limits[card] for card in used]))


def rows(name: str, small: bool) -> list[dict[str, Any]]:
    """The tokens of each plan, for each list of cards."""
    config, cards = MODELS[name]
    if small:
        config.num_hidden_layers, cards = 4, [["4GB", "3GB"]]
    model, gm = captured(config)
    flow, costs = sk.analyze(gm), sk.costs.roofline(gm, "l4")
    prices = StagePrices(flow, costs, None)
    found = []
    for given in cards:
        limits = [read_size(card) or 0 for card in given]
        began = time.process_time()
        with_claim: dict[str, Any] = {"tokens": None, "bound": None}
        with suppress(SplitError):
            claim = sk.plan(gm, Stages(len(given), objective="tokens", memory=given), costs).claim
            assert claim is not None
            with_claim = {"tokens": int(claim.value), "bound": int(claim.bound)}
        seconds = time.process_time() - began
        others: dict[str, int | None] = {}
        for rule, planned in SERVING.items():
            with suppress(SplitError):
                others[rule] = room(prices, planned(flow, model, len(given), costs), limits)
        with suppress(SplitError, IndexError):
            others["accelerate, max_memory"] = room(prices, accelerate_within(flow, model, limits), limits)
        others = {rule: tokens if tokens is None or tokens >= 0 else None for rule, tokens in others.items()}
        found.append({"model": name, "cards": given, **with_claim, "rules": others, "seconds": round(seconds, 2)})
    return found


@dataclass(frozen=True)
class Serving:
    """vllm#6920 on paper.

    Attributes:
        weight: bytes per weight of a layer; embedding and head have two.
        besides: bytes that each rank holds beside weights and cache.
        at_end: further bytes that the last rank holds.
    """

    weight: int
    besides: float = 0.0
    at_end: float = 0.0

    RANKS, LAYERS, BLOCK = 8, 80, 16
    LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672  # weights of a layer
    TABLE = 128256 * 8192 * 2  # bytes of the embedding, and of the head
    CACHE = 4096  # bytes a token and layer: two for each of 2 x 8 x 128 numbers
    MEMORY = 0.9 * 24e9
    REQUESTS, PROMPT, ANSWER = 57, 1_000, 100  # 0.02 % of CNN/DailyMail; lengths are assumed

    def blocks(self, layers: Sequence[int]) -> int:
        """The blocks for which the tightest rank has room."""
        ends = [self.TABLE, *[0.0] * (self.RANKS - 2), self.TABLE + self.at_end]
        spare = [
            self.MEMORY - self.besides - end - count * self.LAYER * self.weight
            for count, end in zip(layers, ends, strict=True)
        ]
        return int(min(left // (count * self.CACHE * self.BLOCK) for left, count in zip(spare, layers, strict=True)))

    def best(self) -> tuple[list[int], int]:
        """The numbers of layers with the most blocks, of all; ranks in the middle are alike, so their order is free."""
        found: tuple[list[int], int] = ([], -1)
        for ends in combinations_with_replacement(range(5, 13), 2):
            for first, last in {ends, ends[::-1]}:
                low, more = divmod(self.LAYERS - first - last, self.RANKS - 2)
                layers = [first, *[low + (i < more) for i in range(self.RANKS - 2)], last]
                found = max(found, (layers, self.blocks(layers)), key=lambda one: (one[1], -sum(n * n for n in one[0])))
        return found

    def seconds(self, layers: Sequence[int], blocks: int) -> float:
        """Seconds for all requests, by the roofline of an L4."""
        speed, bandwidth = 121e12, 300e9
        weights = [count * self.LAYER for count in layers]
        weights[-1] += self.TABLE // 2
        prompts = self.REQUESTS * self.PROMPT * 2 * max(weights) / speed
        length = self.PROMPT + self.ANSWER / 2
        at_once = min(self.REQUESTS, blocks * self.BLOCK / length)
        group = at_once / self.RANKS
        step = max(
            max(
                (one * self.weight + group * length * count * self.CACHE) / bandwidth,
                2 * one * group / speed,
            )
            for one, count in zip(weights, layers, strict=True)
        )
        return prompts + self.REQUESTS * self.ANSWER / group * step


def fitted() -> Serving:
    """Two-byte weights, and what each rank and the last hold besides such that both published numbers come out."""
    plain, even, uneven = Serving(2), [10] * 8, [9, 11, 11, 10, 10, 10, 10, 9]
    block = plain.CACHE * plain.BLOCK
    besides = plain.MEMORY - 11 * plain.LAYER * 2 - 3078.5 * 11 * block
    at_end = plain.MEMORY - besides - plain.TABLE - 10 * plain.LAYER * 2 - 1476.5 * 10 * block
    found = Serving(2, besides, at_end)
    assert (found.blocks(even), found.blocks(uneven)) == (1476, 3078)
    return found


def vllm_rows() -> list[dict[str, Any]]:
    """Even layers and the best numbers of layers, in blocks, and the expected gain."""
    found = []
    for name, serving in (("FP8 weights", Serving(1)), ("16-bit weights", Serving(2)), ("fitted", fitted())):
        even, (best, most) = [10] * 8, serving.best()
        blocks = serving.blocks(even)
        row = {"reading": name, "even": blocks, "layers": best, "blocks": most, "ratio": round(most / blocks, 3)}
        gain = serving.seconds(even, blocks) / serving.seconds(best, most)
        found.append({**row, "gain": round(gain, 3), "besides": [round(serving.besides), round(serving.at_end)]})
    return found


def by_policy(serving: Serving) -> dict[str, Any]:
    """The blocks of splitkit's plan of the captured 70B, which may also cut inside layers."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    _, gm = captured(config)
    memory = [int(serving.MEMORY - serving.besides)] * 8
    memory[-1] -= int(serving.at_end)
    claim = sk.plan(gm, Stages(8, objective="tokens", memory=memory)).claim
    assert claim is not None
    return {"blocks": int(claim.value) // serving.BLOCK, "bound": int(claim.bound) // serving.BLOCK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--small", action="store_true", help="4 layers and one list of cards each, and no 70B")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plans = [row for name in args.models for row in rows(name, args.small)]
    served = vllm_rows()
    policy = None if args.small else by_policy(fitted())
    data = {"plans": plans, "vllm#6920": {"published": [1476, 3078, 1.46], "rows": served, "splitkit": policy}}
    if args.json:
        print(json.dumps(data, indent=2))
        return
    names = [*SERVING, "accelerate, max_memory"]
    table = Table("model", "cards", "splitkit", "at most", *names, "CPU s", title="tokens of cache")
    for row in plans:
        others = [_number(row["rules"].get(name)) for name in names]
        cards = ", ".join(row["cards"])
        table.add_row(row["model"], cards, *map(_number, (row["tokens"], row["bound"])), *others, str(row["seconds"]))
    other = Table("reading", "even", "best layers", "blocks", "ratio", "expected gain", title="vllm#6920, blocks")
    other.add_row("published", "1,476", "fewer at the ends", "3,078", "2.085", "1.46 (measured)")
    for row in served:
        layers = " ".join(map(str, row["layers"]))
        other.add_row(
            row["reading"], f"{row['even']:,}", layers, f"{row['blocks']:,}", str(row["ratio"]), str(row["gain"])
        )
    console = Console(width=170)
    console.print(table, other)
    if policy is not None:
        console.print(f"fitted, cuts inside layers allowed: {policy['blocks']:,} blocks, at most {policy['bound']:,}")


def _number(tokens: int | None) -> str:
    return "-" if tokens is None else f"{tokens:,}"


if __name__ == "__main__":
    main()
