"""The policy `MinCut`: the exact minimum of saved bytes and recompute time, by one s-t cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch.fx import Node

from splitkit.checks import is_number, is_word, shown
from splitkit.costs import Costs
from splitkit.costs.named import priced
from splitkit.errors import PolicyError, SplitError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.search.recompute.pareto_cuts import CutNetwork, cheapest
from splitkit.training.choices import Floats, Savings, savings
from splitkit.training.flow import as_joint
from splitkit.units import duration
from splitkit.units import size as in_bytes

_MOST = 1e100  # times a price, still finite
_RATE = 1e11  # the default of MinCut.price
_SIZE = "It takes a node and returns bytes of at least 0; infinite for values that may not be saved."


@dataclass(frozen=True)
class MinCut:
    """Save the values that are cheaper to save, and recompute those that are cheaper to recompute.

    The plan has the minimum over all legal plans of ``saved bytes + price * recompute seconds``. It is found by one
    minimum s-t cut, in which saving a storage costs its bytes and recomputing an op costs its time. Views are free,
    several values of one storage count once, and inputs and parameters are free to save. Nodes of backward that do not
    depend on gradients may move to forward if that saves bytes. Activation checkpointing tags are respected.

    The minimum is exact up to rounding of ``price * seconds``, with one known gap: a node that only backward needs
    counts as free there, even in the rare case that forward also runs it because a saved value depends on it.

    The method follows He and Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware" (MLSys
    2023), in whose cut recompute is either free or forbidden.

    Attributes:
        price: the bytes that a second of recompute is worth. The default is a tenth of the memory bandwidth of a 2020
            GPU: a matrix product saves far fewer bytes per second of recompute, and a pointwise op far more. 0 saves
            the fewest bytes. ``"fused"`` means the default price for seconds under Inductor (`splitkit.costs.named`),
            on the device of the costs; for another price of such seconds, plan with `splitkit.costs.fused`.
        size: a function that returns the cost of saving a node's value; by default the bytes of its storage. An
            infinite cost means that the value is never saved.
    """

    price: float | Literal["fused"] = 1e11
    size: Callable[[Node], float] | None = None

    def __post_init__(self) -> None:
        price: object = self.price
        if not (is_number(price) and float(price) <= _MOST) and not is_word(price, "fused"):
            remedy = f"Give bytes per second, from 0 to {_MOST:.0e}, such as 1e11; or 'fused'."
            raise PolicyError("SK302", f"MinCut has price={shown(price)}", remedy)
        size: object = self.size
        if size is not None and not callable(size):
            raise PolicyError("SK302", f"MinCut has size={size!r:.200}, which is not a function", _SIZE)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``"forward"`` and ``"backward"``.

        Raises:
            PolicyError: SK302 for a graph that is not a joint graph, and if ``size`` fails or does not return a number
                of bytes.
            NoPlanError: SK303 if ``size`` leaves no plan.
        """
        joint = as_joint(self, flow)
        rate = _RATE if isinstance(self.price, str) else float(self.price)
        problem = savings(joint, priced(joint, costs, self.price) if isinstance(self.price, str) else costs)
        weights = problem.nbytes.astype(np.float64) if self.size is None else _weights(problem, self.size)
        choice = cheapest(CutNetwork.of(problem, weights, problem.fixed), rate, problem.why)
        again = duration(choice.seconds, problem.time_unit)
        return choice.plan(f"min-cut: {in_bytes(choice.nbytes)} saved, {again} computed again")


def _weights(problem: Savings, size: Callable[[Node], float]) -> Floats:
    """Return (k,) the cost of saving each storage, by the user's rule for the value that would be saved."""
    weights = np.zeros(len(problem.nbytes))
    for value, storage, savable in zip(problem.values, problem.storage, problem.savable, strict=True):
        if savable:
            weights[storage] = _weight(value, size)
    return weights


def _weight(value: Node, size: Callable[[Node], float]) -> float:
    """Call the user's ``size`` for one value and check what it returns."""
    try:
        weight = float(found := size(value))
    except SplitError:
        raise
    except Exception as error:
        reason = f"MinCut's size fails on {value.name}: {type(error).__name__}: {error}"
        raise PolicyError("SK302", reason, _SIZE, [value]) from error
    if not weight >= 0:
        raise PolicyError("SK302", f"MinCut's size gives {found!r} for {value.name}", _SIZE, [value])
    return weight
