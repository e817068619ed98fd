"""The policy `SplitBackward`: the exact minimum of what waits between the two parts of a divided backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from splitkit.checks import is_number, shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import Claim
from splitkit.plans.policy import PolicyLike, as_plan, require_policy
from splitkit.plans.record import Plan
from splitkit.policies.save_all import SaveAll
from splitkit.search.deferral_problem import DeferralNetwork, backward_parts, deferrals, divided, plan_in_stages
from splitkit.training.flow import as_joint
from splitkit.units import duration, in_words, size

_MOST = 1e100  # so that price times seconds, which are no larger, is finite


@dataclass(frozen=True)
class SplitBackward:
    """Divide the backward of each stage into an input part and a weight part, so that few bytes wait between them.

    Zero-bubble schedules run the input part immediately, because the previous stage waits for the gradients that it
    computes, and the weight part in what would be a bubble. Until then, the inputs of the weight part are held. This
    policy divides the backward of a plan so that these inputs take as few bytes as possible::

        SplitBackward()                          products in the weight part, the fewest bytes
        SplitBackward(policy=MinCut())           after recompute
        SplitBackward(price=1e12)                a second that is deferred is worth 1 TB

    The input part computes the gradients that leave the stage (for the previous stage, or of model inputs that
    require grad), everything that these need, and everything with side effects or random numbers. Every other node
    of backward can be in the input part, in the weight part, or in both; a minimum cut decides. Each storage counts
    once, however many views of it are read. The caller holds parameters and model inputs anyway. A finished gradient of
    a parameter is accumulated immediately, so it does not wait. The weight part returns only gradients of parameters.

    Without a price, the products that end in weight gradients (matrix products, convolutions, attention, and the
    backward of embeddings) are in the weight part, however many bytes wait for them: deferring them is the purpose of a
    divided backward. Everything else is where the fewest bytes wait or, if that makes no difference, in the weight
    part; only views are computed twice. In a transformer, the input and the output gradient of each linear layer then
    wait, while the gradients of norms and biases, which are quick reductions, are finished in the input part.

    With a price, nothing is fixed: the plan minimises ``waiting bytes + price * seconds``, where the seconds are those
    of nodes that are in the input part without need, and of nodes that run in both parts. At 0 nothing is deferred and
    nothing waits; at a high price, everything that can be deferred is. On an H100, products of large layers have about
    4e11 bytes for each second, and reductions the bandwidth of the memory, 3e12.

    If no gradient leaves a stage (the first one, whose inputs are token ids), nothing has to be in the input part. The
    chain of gradients through the layers is still computed in the input part if fewer bytes wait then, which is the
    case unless the plan recomputes nearly everything. With a price, such a stage defers more, because its whole
    backward can wait.

    A convolution's backward is a single node with the gradients of input and weight, so all of it is in the input part.

    The plan has the parts ``("forward", s)``, ``("input", s)`` and ``("weight", s)`` for each stage ``s``; a plan of
    one forward and one backward is stage 0. Its claim is proven: the value of the cut equals the value of a flow.

    Attributes:
        price: the bytes that may wait per second that is deferred; ``None`` defers products.
        policy: what is saved, what is recomputed, and the stages: a policy or plan for a joint graph.
    """

    price: float | None = None
    policy: PolicyLike = field(default_factory=SaveAll)

    def __post_init__(self) -> None:
        price: object = self.price
        if price is not None and not (is_number(price) and float(price) <= _MOST):
            remedy = f"Give bytes per second, from 0 to {_MOST:.0e}, such as 1e12; or None to defer products."
            raise PolicyError("SK302", f"SplitBackward has price={shown(price)}", remedy)
        require_policy(self.policy)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``("forward", s)``, ``("input", s)`` and ``("weight", s)``.

        Raises:
            PolicyError: SK302 for a graph that is not a joint graph, and for a plan whose parts are not a forward and a
                backward of each stage.
        """
        joint = as_joint(self, flow)
        plan = plan_in_stages(joint, as_plan(self.policy, joint, costs))
        chosen, value, bound = {}, 0.0, 0.0
        for stage, backward in backward_parts(plan).items():
            network = DeferralNetwork.of(deferrals(joint, plan, backward, costs), products=self.price is None)
            choice, least = network.cheapest(self.price or 0.0)
            chosen[stage] = choice
            value += choice.nbytes + (self.price or 0.0) * choice.moved
            bound += least
        largest = max(chosen, key=lambda stage: chosen[stage].nbytes)
        claim = Claim("waiting", value, min(value, bound), "minimum cut", ("weight", largest))
        waiting = [f"{size(choice.nbytes)} in stage {stage}" for stage, choice in chosen.items()]
        times = [sum(c.seconds[i] for c in chosen.values()) for i in range(2)]
        unit = next(iter(chosen.values())).problem.time_unit
        deferred = f"{duration(times[1], unit)} of the {duration(sum(times), unit)} of backward are deferred"
        told = in_words(waiting) if len(chosen) > 1 else size(next(iter(chosen.values())).nbytes)
        note = f"{deferred}, and {told} wait for that meanwhile"
        before = f". Before that: {plan.note}" if plan.note else ""
        return replace(divided(plan, chosen), note=f"{note}{before}", claim=claim)
