from __future__ import annotations

from collections.abc import Iterator

import torch
from opnodes import ROOT, call
from torch._ops import OpOverload, OpOverloadPacket

from splitkit.graph.ops import effects_of
from splitkit.graph.ops.facts import argument_nodes
from splitkit.graph.ops.schemas import is_registered, may_share

aten = torch.ops.aten


def every_overload() -> Iterator[OpOverload]:
    everything = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    for name in sorted(everything):
        packet = getattr(aten, name[6:], None)
        if isinstance(packet, OpOverloadPacket):
            yield from (getattr(packet, o) for o in packet.overloads())


def test_every_aten_schema_is_believed_about_writes() -> None:
    count = 0
    unsaid = {"_cudnn_rnn", "_cudnn_rnn_flatten_weight", "miopen_rnn"}
    for overload in every_overload():
        arguments = overload._schema.arguments
        given = {a.name: f"${a.name}_" for a in arguments}
        args = [[v] if "List[Tensor]" in str(a.type) else v for a, v in zip(arguments, given.values(), strict=True)]
        positional = [v for a, v in zip(arguments, args, strict=True) if not a.kwarg_only]
        node = call(overload, *positional, **{a.name: v for a, v in zip(arguments, args, strict=True) if a.kwarg_only})
        by_name = dict(
            zip(
                (a.name for a in arguments),
                (argument_nodes(x) for x in [*node.args, *node.kwargs.values()]),
                strict=True,
            )
        )
        declared = {n for a in arguments if a.alias_info and a.alias_info.is_write for n in by_name[a.name]}
        effects = effects_of(node, ROOT)
        assert effects.known
        name = overload._schema.name[6:]
        assert declared <= set(effects.writes), overload
        if "running_mean" not in by_name and name not in unsaid:
            assert declared == set(effects.writes), overload
        tensors = any("Tensor" in str(a.type) for a in arguments)
        if tensors and name.endswith("_") and not name.startswith("_") and is_registered(overload):
            assert effects.writes or name.endswith("__"), overload
        if any(a.is_out for a in arguments):
            outs = {n for a in arguments if a.is_out for n in by_name[a.name]}
            assert outs <= set(effects.writes), overload
        returned = {
            n for a in arguments if a.alias_info and may_share(a, overload._schema.returns) for n in by_name[a.name]
        }
        assert returned <= set(effects.aliases) | set(effects.writes), overload
        if torch.Tag.nondeterministic_seeded in overload.tags:
            assert effects.random, overload
        count += 1
    assert count > 2100
