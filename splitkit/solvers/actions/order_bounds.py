"""Lower bounds on the value of every order, from sums of times and from the windows of single stages.

* **Work**: a rank cannot start before its first message, and then has all its work to do.
* **Path**: forwards and input parts of a stage run one after the other, the first once its message has come; after the
  last input part the gradient goes back to each earlier stage, whose last weight part still follows.
* **Window**: if the windows of a value contradict each other (`splitkit.solvers.actions.stage_windows`), no order has
  it. Memory enters here: what a rank can have in flight decides how soon its input parts can follow its forwards.
"""

from __future__ import annotations

from splitkit.solvers.actions.order_problem import F, I, OrderProblem, W


def work_or_path_bound(problem: OrderProblem) -> float:
    """Return the larger of the work and the path bound."""
    ends = [first + work for first, work in zip(problem.first, problem.work, strict=True)]
    work = max(end + late for end, late in zip(ends, problem.late, strict=True))
    return max(work, *(_path(problem, stage) for stage in range(problem.stages)))


def _path(problem: OrderProblem, stage: int) -> float:
    seconds, travel = problem.seconds, problem.travel
    arrival = sum(seconds[s][F] + travel[s][F] for s in range(stage))
    after = range(stage + 1, problem.stages)
    there_and_back = sum(seconds[s][F] + seconds[s][I] + travel[s - 1][F] + travel[s][I] for s in after)
    own = seconds[stage]
    busy = problem.microbatches * (own[F] + own[I])
    # One microbatch alone goes on to the last stage and back; all of them keep this stage busy.
    end = arrival + max(busy, own[F] + there_and_back + own[I])
    found = 0.0
    for s in range(stage, -1, -1):
        if s < stage:
            end += travel[s + 1][I] + seconds[s][I]
        found = max(found, end + seconds[s][W] + problem.late[problem.rank_of[s]])
    return found
