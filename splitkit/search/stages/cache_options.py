"""The options of `Stages` for inference with a cache: which go together, and which node keeps how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from splitkit.checks import Memory, is_whole, is_word, shown
from splitkit.errors import PolicyError
from splitkit.graph.caches import caches_of
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_values import cache_bytes
from splitkit.pipeline.decoder_step import DecoderSteps
from splitkit.prices import Costs, as_given, includes_backward

OBJECTIVES = ("tokens", "throughput")


@dataclass(frozen=True)
class CacheOptions:
    """The options of a policy that are checked here.

    Attributes:
        policy: the name of the policy, for errors.
        objective: ``"tokens"``, ``"throughput"`` or ``None``.
        tokens: the tokens for which there must be room.
        cache: node, or its name -> bytes of cache per token; ``None``: as the graph says.
    """

    policy: str
    objective: str | None
    tokens: int
    cache: Mapping[str | Node, int] | None


def check_cache(options: CacheOptions, memory: Memory, training: Mapping[str, object]) -> None:
    """Refuse options that do not go with the objective.

    Args:
        options: the options.
        memory: the memory of the devices.
        training: the names of options that only training has, and those that are given.

    Raises:
        PolicyError: SK302.
    """
    name, objective = options.policy, options.objective
    check_tokens(name, options.tokens)
    if objective is None:
        if options.tokens:
            raise _wrong(f"{name}: tokens is given without an objective", 'Add objective="throughput".')
        if options.cache is not None:
            remedy = 'Stages needs objective="tokens" or "throughput", and Devices needs tokens.'
            raise _wrong(f"{name}: cache is given without an objective", remedy)
        return
    if not is_word(objective, *OBJECTIVES):
        raise _wrong(f"{name}: objective is {shown(objective)}", "Use 'tokens' or 'throughput', or leave it out.")
    for field, given in training.items():
        raise _wrong(f"{name}: {field}={shown(given)} is for training, and objective={objective!r} for inference")
    if is_word(memory, "least"):
        raise _wrong(
            f"{name}: memory='least' cannot be combined with objective={objective!r}", 'Give sizes: memory="24GiB".'
        )
    if objective == "tokens":
        _check_most(name, memory, options.tokens)


def check_tokens(name: str, tokens: object) -> None:
    """Refuse a value that is not a number of tokens.

    Raises:
        PolicyError: SK302.
    """
    if not is_whole(tokens):
        raise _wrong(f"{name}: tokens is {shown(tokens)}", "Give a whole number, 0 or more.")


def _check_most(name: str, memory: Memory, tokens: int) -> None:
    sizes = [memory] if memory is None or isinstance(memory, str | int) else memory
    if any(one is None for one in sizes):
        raise _wrong(f"{name}: objective='tokens' needs the memory of each device", 'Add memory="24GiB".')
    if tokens:
        remedy = "Leave tokens out, or use objective='throughput', which takes them as given."
        raise _wrong(f"{name}: objective='tokens' finds the tokens, and tokens={tokens} is given", remedy)


def _wrong(reason: str, remedy: str = "Leave one of them out.") -> PolicyError:
    return PolicyError("SK302", reason, remedy)


def cache_of(options: CacheOptions, flow: Dataflow, costs: Costs) -> Mapping[Node, int]:
    """Return the bytes of cache per token of each node that keeps some.

    Raises:
        PolicyError: SK302 if a key is not a node, or bytes are not a whole number; if the graph has no attention that
            keeps a cache and ``cache`` does not say which nodes do; or if the prices include backward.
    """
    name = options.policy
    if includes_backward(as_given(costs)):
        reason = f"{name}: the prices include backward, but objective={options.objective!r} is for inference"
        raise _wrong(reason, "Give the prices of forward: sk.costs.roofline(gm, 'h100').")
    if options.cache is None:
        found = cache_bytes(flow)
        if not found and caches_of(flow.root) and DecoderSteps.of(flow, costs, 1) is None:
            reason = f"{name}: the model keeps states of a constant size, and nothing for each token"
            raise _wrong(reason, 'Leave objective out: memory="24GiB" counts the states of the captured batch.')
        if not found and (options.tokens or options.objective == "tokens"):
            reason = f"{name}: no node calls scaled_dot_product_attention, so it is not known which nodes keep a cache"
            raise _wrong(reason, 'Give cache={"node": bytes per token}, or load the model with sdpa attention.')
        return found
    given: object = options.cache
    if not isinstance(given, Mapping):
        raise _wrong(f"{name}: cache is {shown(given)}", 'Give a mapping: cache={"node": bytes per token}.')
    named = {node.name: node for node in flow.nodes}
    known: dict[Node, int] = {}
    for key, nbytes in given.items():
        node = key if isinstance(key, Node) else named.get(str(key))
        if node is None or named.get(node.name) is not node:
            raise _wrong(
                f"{name}: cache names {shown(key)}, which is not a node of the graph", "Name nodes of the graph."
            )
        if not is_whole(nbytes):
            raise _wrong(f"{name}: cache[{node.name!r}] is {shown(nbytes)}", "Give a whole number of bytes per token.")
        known[node] = int(nbytes)
    if options.objective == "tokens" and not any(known.values()):
        raise _wrong(f"{name}: cache has no bytes", 'Give cache={"node": bytes per token}.')
    return {node: nbytes for node, nbytes in known.items() if nbytes}
