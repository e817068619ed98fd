"""The backend that ``torch.compile(model, backend="splitkit")`` finds by its name.

torch looks for the name in the entry points of installed packages (group ``torch_dynamo_backends``, see
torch/_dynamo/backends/registry.py: 2.11, 2.13, 2.15), so nothing needs to be imported or registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from splitkit.checks import shown
from splitkit.errors import PolicyError
from splitkit.frontends.compile.compile import backend


def splitkit_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """Compile a graph with the lowest peak that is found, as ``splitkit.backend("least")`` does.

    Args:
        gm: a graph of Dynamo.
        example_inputs: its inputs.
        options: the options of ``torch.compile``: ``{"inner": "inductor"}`` chooses what runs the halves.
        others: other arguments of ``torch.compile``, such as its mode, which are refused.

    Raises:
        PolicyError: SK302 for an option that this backend does not have.
    """
    given = {**(options or {}), **others}
    unknown = [name for name in given if name != "inner"]
    if unknown:
        raise PolicyError(
            "SK302",
            f"the backend 'splitkit' has no option {unknown[0]!r} (it is {shown(given[unknown[0]])})",
            "Its only option is inner ('eager', 'aot_eager', 'inductor'). For another budget or policy, write "
            "backend=splitkit.backend('2GiB').",
        )
    return backend("least", given.get("inner", "eager"))(gm, example_inputs)
