"""Rules for operators and functions whose effects depend on their arguments: a mode, a probability or an option."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Call, Effects, Rule, first_argument


def rule_for(name: str, parameters: Collection[str]) -> Rule | None:
    """Return the rule of an operator or function, by its name and the names of its parameters."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if "dropout_p" in parameters:
        return _attention
    if "running_mean" in parameters and not any(w in name for w in _NO_STATISTICS):
        return _running_stats
    if "max_norm" in parameters and name in ("embedding", "embedding_bag"):
        return _embedding
    if name.startswith("fractional_max_pool") and "random_samples" not in parameters:
        return _random_samples
    return None


def dropout(call: Call, effects: Effects) -> Effects:
    """Dropout returns its input itself in eval mode and at p=0, whatever the schema says."""
    first, name = first_argument(call.node), call.facts.name
    inplace = name.endswith("_") or call.may("inplace", default=False)
    # 1d and 3d unsqueeze their input in place, whatever the mode
    written = inplace and (call.may("train", "training") or name.endswith("d"))
    kept = inplace or call.may_not("p") or call.may_not("train", "training")
    out = call.nodes("out")
    return Effects(
        (*out, *(first if written else ())),
        (*out, *(first if kept else ())),
        random=call.may("p") and call.may("train", "training"),
    )


def _native_dropout(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.get("train") is None or call.may("train"))  # p=0 still draws


def _rnn(call: Call, effects: Effects) -> Effects:
    random = call.may("dropout") and call.may("train")
    state = call.nodes("dropout_state") if random else ()  # cudnn keeps its generator in a tensor
    return replace(effects, random=random, writes=(*effects.writes, *state))


def _rrelu(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.may("training"))


def _attention(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.may("dropout_p") and call.may("training", default=True))


_NO_STATISTICS = ("backward", "functional", "no_update", "no_training")


def _running_stats(call: Call, effects: Effects) -> Effects:
    running = call.nodes("running_mean", "running_var")
    others = tuple(n for n in effects.writes if n not in running)
    training = call.may("training", "train", "use_input_stats")
    return replace(effects, writes=(*others, *running) if training else others)


def _embedding(call: Call, effects: Effects) -> Effects:
    # with a max_norm the rows that are looked up are renormalized in place (embedding_bag takes its two in any order)
    if call.get("max_norm", default=None) is None:
        return effects
    return replace(effects, writes=(*effects.writes, *call.nodes("weight", "input")))


def _random_samples(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.node.kwargs.get("_random_samples") is None)


def _einsum(call: Call, effects: Effects) -> Effects:
    if not call.node.args:
        return replace(effects, aliases=tuple(call.node.all_input_nodes))
    equation, *operands = call.node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    several = isinstance(equation, str) and len(operands) > 1
    return effects if several else replace(effects, aliases=tuple(call.node.all_input_nodes))  # of one: a view


def _always_random(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=True)


_BY_NAME: dict[str, Rule] = {
    **dict.fromkeys(op_tables.DROPOUTS, dropout),
    "native_dropout": _native_dropout,
    **dict.fromkeys(op_tables.RNNS, _rnn),
    **dict.fromkeys(op_tables.RRELUS, _rrelu),
    "einsum": _einsum,
    "gumbel_softmax": _always_random,
}
