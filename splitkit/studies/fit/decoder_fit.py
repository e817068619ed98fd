"""Asks the planner how many tokens a decoder's stages hold: the plan that `splitkit plan` then makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from splitkit.costs import Costs, default
from splitkit.errors import CaptureError, NoPlanError
from splitkit.frontends.decoder.capture_decoder import capture_decoder
from splitkit.graph.cache_bytes import cache_bytes
from splitkit.graph.dataflow import Dataflow, analyze, module_path
from splitkit.pipeline.decoder_step import DecoderSteps, graph_of_nodes, weights_of
from splitkit.plans.record import Plan
from splitkit.policies.stages import Stages
from splitkit.studies.fit.blocks import ModelBlock
from splitkit.studies.fit.cards import Card
from splitkit.studies.fit.fit_model import FitModel
from splitkit.studies.fit.fit_result import FittedDevice
from splitkit.studies.fit.layout import HeldBytes
from splitkit.studies.fit.next_step import has_attention_alone


@dataclass(frozen=True, eq=False)
class DecoderFit:
    """Answers for a decoder that `capture_decoder` takes, with weights as the model has them.

    Attributes:
        subject: the model.
        blocks: its blocks, by which the table names what a device runs.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes, of all requests together.
    """

    subject: FitModel
    blocks: Sequence[ModelBlock]
    requests: int
    chunk: int

    @cached_property
    def flow(self) -> Dataflow:
        """Facts about the graph of a step."""
        return analyze(capture_decoder(self.subject.in_mode(training=False), batch=self.requests))

    @property
    def is_planned(self) -> bool:
        """Whether the planner counts all that generation takes, and its caches grow; else only a run tells."""
        if self.subject.stored or self.subject.bits is not None or not has_attention_alone(self.subject.model):
            return False
        try:
            return self._steps is not None and bool(self._cached)
        except CaptureError:
            return False

    @cached_property
    def _costs(self) -> Costs:
        return default(self.flow)

    @cached_property
    def _steps(self) -> DecoderSteps | None:
        return DecoderSteps.of(self.flow, self._costs, self.chunk)

    @cached_property
    def _cached(self) -> Mapping[Node, int]:
        return cache_bytes(self.flow)

    def plan(self, cards: Sequence[Card]) -> Plan | None:
        """Return the plan with room for the most tokens, one stage on each device; ``None`` if none has room for one.

        Its claim counts the tokens of all requests.
        """
        limits = [card.limit for card in cards]
        policy = Stages(len(cards), memory=limits, objective="tokens", chunk=self.chunk)
        try:
            return policy.assign(self.flow, self._costs)
        except NoPlanError:
            return None

    def devices(self, cards: Sequence[Card], plan: Plan, tokens: int) -> list[FittedDevice]:
        """Return what each device holds with so many tokens of each request."""
        flow, cached, steps, found = self.flow, self._cached, self._steps, []
        assert steps is not None, "a decoder whose caches grow"
        for key, card in enumerate(cards):
            nodes = [node for node in flow.nodes if plan.home(node) == key]
            part = graph_of_nodes(flow, nodes)
            weights, peak = weights_of(part), steps.peak(part, tokens * self.requests)
            cache = tokens * self.requests * sum(cached.get(node, 0) for node in nodes)
            held = HeldBytes(weights=weights, cache=cache, activations=peak - weights - cache)
            paths = {f"{module_path(node)}." for node in nodes}
            inside = [b.name for b in self.blocks if any(path.startswith(f"{b.name}.") for path in paths)]
            found.append(FittedDevice(card, tuple(inside), held))
        return found
