"""Makes the page a notebook widget (anywidget), so that borders that the user drags change a plan in Python.

The traits ``data``, ``borders`` and ``height`` are synchronized with the page. The slider asks Python for a plan by a
message, since planning may take seconds; all other changes are computed on the page.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anywidget
import traitlets

from splitkit.costs.links import links_of
from splitkit.costs.recorded import record_of
from splitkit.engine.split import plan as checked_plan
from splitkit.engine.split import with_origin
from splitkit.errors import SplitError, ViewError
from splitkit.pipeline.stage_prices import run_order
from splitkit.plans.parts import Part
from splitkit.plans.record import Plan, checkpointed
from splitkit.policies import Stages
from splitkit.view.data.ladder import LadderView, resimulated
from splitkit.view.page import style
from splitkit.view.page.bundle import script
from splitkit.view.page.html import fragment
from splitkit.view.svg.ladder_svg import ladder_svg


class LadderWidget(anywidget.AnyWidget):  # type: ignore[misc]  # untyped where it is not installed
    """A plan that can be changed on its picture.

    ::

        w = splitkit.split(gm, splitkit.policies.Stages(4)).view(live=True)
        w                      # on the last line of a cell: drag the borders, move the slider
        w.plan                 # in a later cell: the plan as it is now

    Attributes:
        ladder: the plan that Python made last, as it is drawn.
        planner: number of stages -> a plan, called when the slider moves; by default `splitkit.policies.Stages` by the
            prices of the picture. To use another: ``w.planner = lambda n: splitkit.plan(gm, ...)``.
        answers: how often Python has sent a new plan; marimo reruns dependent cells when it changes.
        borders: the first row of each stage, and the number of rows; may be set.
    """

    _esm = script(widget=True)
    _css = style()
    data = traitlets.Dict().tag(sync=True)
    borders = traitlets.List(traitlets.Int()).tag(sync=True)
    answers = traitlets.Int(0).tag(sync=True)
    height = traitlets.Int(720).tag(sync=True)

    def __init__(self, ladder: LadderView, height: int = 720) -> None:
        self.ladder, self._step = ladder, ladder.run
        self.planner: Callable[[int], Plan] = self._stages
        super().__init__(data=ladder.to_dict(), borders=ladder.borders, height=height)
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return f"<{len(self.borders) - 1} stages to steer: .plan is the plan as it is now>"

    def _repr_mimebundle_(self, **asked: Any) -> Any:
        """Return the widget, and the still picture for viewers without a kernel, such as nbviewer."""
        made = super()._repr_mimebundle_(**asked)
        data, metadata = made if isinstance(made, tuple) else (made, {})
        return {**data, "text/html": fragment(ladder_svg(self.ladder), [])}, metadata

    @property
    def plan(self) -> Plan:
        """The plan with the borders as they are now, checked; the plan of `ladder` itself if none has moved.

        Raises:
            PlanError: if the graph cannot be split there.
        """
        borders, ladder = list(self.borders), self.ladder
        if borders == ladder.borders:
            return ladder.plan
        keys = run_order(ladder.flow, ladder.plan)
        same = len(keys) == len(borders) - 1  # then the parts keep their keys, devices and replicas
        of = {node: bisect_right(borders, row) - 1 for node, row in ladder.rows.of.items()}
        places = {node: (keys[stage] if same else stage,) for node, stage in of.items()}
        parts = {key: ladder.plan.parts[key] for key in keys} if same else {}
        if not same and self._is_rerun:
            parts = {stage: Part(stage, call="checkpoint") for stage in range(len(borders) - 1)}
        note, prices = f"{len(borders) - 1} stages, moved by hand", record_of(ladder.costs, ladder.flow)
        asked = ladder.plan.request if same else replace(ladder.plan.request, devices={})
        made = Plan(places, parts, note=note, prices=prices, request=asked)
        return checked_plan(ladder.flow.root, made)

    @traitlets.validate("borders")  # type: ignore[untyped-decorator]
    def _validated(self, proposal: Mapping[str, Any]) -> list[int]:
        borders, rows = list(proposal["value"]), len(self.ladder.rows)
        if len(borders) < 2 or (borders[0], borders[-1]) != (0, rows) or any(a >= b for a, b in pairwise(borders)):
            raise ViewError(
                "SK901",
                f"{borders!r:.200} are not borders of {rows} rows",
                f"Give increasing numbers from 0 to {rows}.",
            )
        return borders

    def _stages(self, count: int) -> Plan:
        ladder, asked = self.ladder, self.ladder.plan.request
        policy = Stages(count, links=links_of(asked.links), optimizer=ladder.optimizer)
        plan = with_origin(policy.assign(ladder.flow, ladder.costs), policy, ladder.flow, ladder.costs)
        plan = replace(plan, request=replace(asked, devices={})) if asked.purpose else plan
        return checkpointed(plan) if self._is_rerun else plan

    @property
    def _is_rerun(self) -> bool:
        """Whether backward runs all parts again."""
        return all(part.call == "checkpoint" for part in self.ladder.plan.parts.values())

    def _planned(self, plan: Plan) -> LadderView:
        """Return the picture of another plan, with the step resimulated if there is one and its schedule allows."""
        ladder = replace(self.ladder, plan=plan, run=None, measured=None)
        step = self._step
        return ladder if step is None else replace(ladder, run=resimulated(step, ladder.stages))

    def _answer(self, _widget: object, content: object, _buffers: object) -> None:
        """Answer the slider: plan for the number of stages that the page asks for, or send the reason why not."""
        count = content.get("stages") if isinstance(content, dict) else None
        if not isinstance(count, int):
            return
        self.send({"planning": count})  # tells the page that the kernel lives, however long planning takes
        try:
            ladder = self._planned(self.planner(count))
            data, borders = ladder.to_dict(), ladder.borders
        except SplitError as error:
            self.send({"refused": f"{error.reason}. {error.remedy}"})
            return
        except Exception as error:  # of a planner of the user's own
            self.send({"refused": f"The planner failed: {type(error).__name__}: {error}"})
            raise
        self.ladder = ladder
        with self.hold_sync():  # one message: the page must never see the borders of one plan with the rows of another
            self.data, self.borders = data, borders
        self.send({"planned": count})
