"""Costs measured op by op: the graph runs on real inputs, and each op that is new is timed where it stands.

A group is the nodes that call one op with the same shapes, strides, dtypes and other arguments in the same modes; its
first node is measured for all. The arguments are those of a real run, so that indices, labels and masks are valid.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import fx

from splitkit.checks import LONGEST, is_number, shown
from splitkit.costs.cache import CostCache, default_path, environment
from splitkit.costs.copies import Private, find_device
from splitkit.costs.counting import flops
from splitkit.costs.in_place import time_in_place
from splitkit.costs.measuring import Measured, MeasuringRun, generators
from splitkit.costs.steps import MeasuredSteps, measured_steps, require_steps
from splitkit.costs.timing import progress
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, facts_of


def measured(
    gm: fx.GraphModule | Dataflow,
    inputs: Any,
    device: torch.device | str = "cpu",
    *,
    cache: str | os.PathLike[str] | bool | None = True,
    min_run_time: float = 0.02,
    backward: bool = False,
) -> Measured | MeasuredSteps:
    """Costs by real times on a CPU or a CUDA device.

    Runs the graph once, without autograd, and times the first node of each group on its real arguments: after a
    warm-up, the median, by ``torch.utils.benchmark`` with the threads that torch has now, or by CUDA events (the least
    median of several batches). An op that
    writes its arguments gets copies of them each time. On a CPU the graph then runs a few times more, from the same
    state, and each op is timed where it stands: with what its dispatch takes (views too), memory that is given anew and
    arguments that the caches have lost; of several runs that counts where a group's mean is least, for what else the
    machine does only adds. So the prices of a part's nodes add up to the time that the part takes. A
    graph in which an op acts on the outside world runs once, and keeps the times of the ops alone. Parameters, buffers,
    inputs and random state stay as they are; nothing is copied on a CPU but the inputs and the buffers that the graph
    writes. Memory is that of a run that frees each value after its last use, plus the results and copied arguments of
    one op. On a GPU torch's peak-memory statistics start anew.

    What the numbers leave out: on a GPU, or where the graph may run only once, a view (of any kind that yields the
    memory of an argument and writes nothing) takes 0, and arguments lie in the caches, where a real run may find them
    cold; and, without ``backward``, what autograd and an op's backward cost. An op that acts on the outside world, or
    of which nothing is known, runs once, as in the graph; declare it with `splitkit.extend.declare` to have it
    measured. A shape or branch that depends on data is that of ``inputs``.

    With ``backward`` steps of forward and backward run besides, from those outputs that are losses (one number that
    requires grad; from all that require grad if there are none), and prices are of both: in forward with what autograd
    does there, in backward with all that an op's gradients take, and their adding up. Where no step writes what the
    next one reads, it runs in memory that the one before has used. No parameter gets a gradient by it; memory is that
    of such a step. Without, `splitkit.costs.training` estimates backward by formula.

    A machine that is busy with other work makes times too long. So runs count that had to wait for a processor for no
    more than 5 % of their time, as the kernel tells; some more are made until there is one. If there is none, the
    prices have ``busy`` set, ``note`` says so, and they are not kept in the file. Where torch has one thread, these
    prices are still near the truth: the time during which others held the processor is left out. With several threads
    they are the least times of all runs.

    Times are kept in a file by op, shapes, dtypes, modes, device, torch version and threads; a call that finds all of
    them there measures nothing. Ctrl-C keeps what is measured so far. A damaged file is ignored with a warning, and
    rewritten. Functions without a name of their own (lambdas, local ones, those of a script) are not kept.

    Args:
        gm: a graph with ``meta["val"]``, or facts about it.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        device: where to measure. Parameters and inputs that are elsewhere are copied there, and devices in the graph
            are replaced.
        cache: the file; ``True`` for ``$XDG_CACHE_HOME/splitkit/costs.json``, ``False`` for none.
        min_run_time: seconds for each group, alone and again in place; a group that takes longer runs a few times.
        backward: measure backward too; on a CPU, where the graph may run more than once.

    Raises:
        GraphError: SK101, SK103 or SK104 as `splitkit.analyze`; SK102 when nodes have no ``meta["val"]``.
        CostError: SK321 when there is no such device; SK324 when the graph does not run on these inputs, or cannot be
            measured as it is asked for.
        FileError: SK504 when the cache is there and cannot be read.
    """
    flow = facts_of(gm)
    if not isinstance(backward, bool):
        raise CostError("SK324", f"backward is {shown(backward)}", "Give True or False.")
    counter, where = flops(flow), find_device(device)
    if not is_number(min_run_time) or not 0 < float(min_run_time) <= LONGEST:
        raise CostError("SK324", f"min_run_time is {shown(min_run_time)} seconds", "Give a number above 0.")
    if not isinstance(cache, str | os.PathLike | bool | None):
        raise CostError("SK324", f"cache is {shown(cache)}", "Name a file, or give True or False.")
    path = default_path() if cache is True else Path(cache).expanduser() if cache else None
    if backward:
        require_steps(flow, where)
    kept = CostCache(path, environment(where))
    private = Private(flow, where)
    values = private.inputs(inputs)
    with progress(len(flow.index)) as advance, torch.random.fork_rng(generators(where)), torch.no_grad():
        dice = torch.random.get_rng_state()
        run = MeasuringRun(flow, private, kept, min_run_time, advance)
        with run.safely():
            run.run(*values, enable_io_processing=False)
        del private, values
        if run.keys and not run.acts_outside and where.type == "cpu":
            time_in_place(run, inputs, dice)
        found = Measured(flow.root, where, run.found, counter)
        return measured_steps(run, found, inputs, dice) if backward else found
