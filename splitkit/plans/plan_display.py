"""The methods `view`, `to_html`, `to_svg` and `explain` that plans and splits share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from splitkit.display import Shown, ShownOverTime
from splitkit.plans.parts import PartKey
from splitkit.plans.plan_request import PlannedOptimizer
from splitkit.prices import Costs

if TYPE_CHECKING:
    from splitkit.files import PathLike

OtherPlan = Mapping[Node, tuple[PartKey, ...]]
"""Another plan of the same graph to compare with; a `splitkit.Plan` is such a mapping."""


class ShownPlan(Shown):
    """An object that is drawn as a plan of a graph."""

    def explain(
        self, where: object = None, *, policy: object = None, costs: Costs | None = None, again: bool = True
    ) -> Any:
        """Explain why the plan is as it is: what limits it, how far from the best it may be, what would help.

        The explanation prints as text, has ``to_dict()``, and a notebook shows it as HTML.

        Args:
            where: a node or its name, to explain instead of the whole plan.
            policy: the policy whose limits hold (memory, schedule, links); by default the one that made the plan, if
                the plan has recorded it.
            costs: the prices; by default those that the plan was made with.
            again: whether to plan again with one more device, one fewer, and more memory; that takes as long as
                planning.

        Raises:
            PlanError: SK314 if the graph has no such node.
            PolicyError: SK301 if ``policy`` is not a policy.
        """
        return Shown.explainer()(self, where, policy=policy, costs=costs, again=again)

    def view(
        self,
        *,
        height: int | None = None,
        live: bool = False,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> Any:
        """Return an interactive page in a frame, which a notebook shows if this is the last line of a cell.

        Args:
            height: height of the frame in pixels.
            live: return a widget that plans again in Python when the number of stages changes, and whose ``plan``
                follows the stages as they are dragged. This needs ``pip install anywidget``.
            costs: prices of the nodes; by default those that the plan was made with, or FLOPs if it does not know them.
            optimizer: as for `splitkit.stage_costs`: by default what the plan was made for; ``None`` for inference. A
                plan of a joint graph ignores it.
            memory: the memory of each device in bytes (or ``"80GiB"``); stages that exceed it are red.
            run: a step of these stages, as `splitkit.simulate_schedule` returns it; its timeline is drawn below, which
                needs prices in seconds.
            measured: what the ranks did when the step ran (`splitkit.runtime.StepRecorder.measured`, or
                `splitkit.MeasuredStep.load` of a trace file), drawn beside the actions of ``run``, which must
                be the same: ``run=sk.simulate_schedule(stages, measured.order)``.
            beside: another plan of the graph to compare with, or several; rows that one of them puts into another stage
                are marked.
            title: the text above the picture; by default the note of the plan.

        Raises:
            ViewError: SK901 if the plan cannot be drawn, or not with these options; SK902 if ``live`` is given and
                anywidget is not installed; SK903 for a step by prices that are not times.
        """
        return self._framed(
            height,
            live,
            costs=costs,
            optimizer=optimizer,
            memory=memory,
            run=run,
            measured=measured,
            beside=beside,
            title=title,
        )

    def to_html(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> None:
        """Write the page as one file that any browser shows, or the still picture if its name ends in ``.svg``.

        The options are those of `view`.

        Raises:
            ViewError: SK901 if the plan cannot be drawn, or not with these options.
            FileError: SK504 if the file cannot be written; an existing file is then left as it was.
        """
        options = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": run, "measured": measured}
        self._write_html(path, **options, beside=beside, title=title)

    def to_svg(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        measured: object = None,
        beside: OtherPlan | Sequence[OtherPlan] | None = None,
        title: str = "",
    ) -> None:
        """Write a static picture; the options are those of `view`, the errors those of `to_html`."""
        options = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": run, "measured": measured}
        self._write_svg(path, **options, beside=beside, title=title)
