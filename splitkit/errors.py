"""The errors that splitkit raises on purpose: one family, each with a stable code, a reason and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

CODES: dict[str, str] = {
    "SK101": "not a graph",
    "SK102": "a node has no meta['val']",
    "SK103": "regions do not balance",
    "SK104": "an attribute of the graph does not exist, or is computed anew at each read",
    "SK105": "a region cannot be registered",
    "SK106": "a part of a split cannot be inlined",
    "SK107": "a graph cannot be pickled",
    "SK108": "a size has no bound",
    "SK109": "a graph does not run on fake tensors",
    "SK110": "an option of the memory simulation makes no sense",
    "SK111": "a node reads a node that does not come before it in its graph",
    "SK112": "a parameter has no values: a lazy module has made none yet, or it is on meta",
    "SK201": "the plan names nodes of another graph",
    "SK202": "a node that may run only once is planned several times",
    "SK203": "parts depend on each other in a cycle",
    "SK204": "a name in the mapping is not a node of the graph",
    "SK205": "a node has no part, or one part twice",
    "SK206": "a part does not exist or is described wrongly",
    "SK207": "a checkpointed part has effects",
    "SK208": "a node that is needed has no part",
    "SK209": "values cannot be relayed from part to part",
    "SK210": "a node that may run only once is moved to the other half",
    "SK211": "the key of a part equals other keys",
    "SK212": "inputs of a call share memory that is written",
    "SK215": "a later graph writes to memory that backward needs",
    "SK216": "a part cannot be replaced",
    "SK217": "a region would not be the same if several parts opened it",
    "SK218": "opaque code may rebind attributes of the graph module",
    "SK219": "an input of a call is not a tensor",
    "SK220": "a value cannot be offloaded",
    "SK221": "a module of a split cannot have a hook",
    "SK301": "not a policy",
    "SK302": "a policy was given a bad parameter",
    "SK303": "no plan fits",
    "SK304": "a pattern or name matches nothing",
    "SK305": "the model sets a memory budget of its own",
    "SK307": "torch's selective checkpointing cannot carry out the plan",
    "SK310": "a node of a partition is not in the graph, or in two partitions",
    "SK311": "partitions that are to be fused wait for each other",
    "SK314": "a plan has no such node",
    "SK316": "plans of two kinds are compared",
    "SK320": "a device is described wrongly",
    "SK321": "there is no such device",
    "SK322": "links are described wrongly",
    "SK323": "the costs do not fit",
    "SK324": "a graph cannot be measured",
    "SK325": "a node was not measured",
    "SK330": "a schedule does not fit the numbers of stages, ranks or microbatches",
    "SK331": "the actions of a schedule deadlock",
    "SK332": "the costs of a stage make no sense",
    "SK333": "a registered schedule contradicts itself",
    "SK401": "the model could not be captured",
    "SK402": "an example model or its package is missing",
    "SK403": "a model factory is wrong",
    "SK404": "a custom backward cannot be kept",
    "SK405": "a hook on gradients would be lost",
    "SK410": "an effect would be lost",
    "SK501": "a file is not a plan",
    "SK502": "a plan was made for another graph",
    "SK503": "a plan file has another schema number",
    "SK504": "a file could not be read or written",
    "SK505": "a folder of stages or a checkpoint is damaged, or has a file of another one",
    "SK506": "a stage or the state of a run cannot be written as data",
    "SK507": "the weights or the checkpoint do not fit",
    "SK508": "a stage needs an op or a class that this process does not have",
    "SK509": "a plan was made for other sizes",
    "SK510": "a file is not a trace of a step",
    "SK512": "a folder has the checkpoints of another run",
    "SK521": "there is no such export format",
    "SK522": "a plan cannot be rounded to the modules of the model",
    "SK523": "a format cannot carry the plan",
    "SK524": "a text is not in the format",
    "SK525": "a text does not fit the model",
    "SK601": "the command was used wrongly",
    "SK602": "a model is given without the function that makes it",
    "SK603": "an output would overwrite a file that is needed",
    "SK701": "the split differs from the whole",
    "SK702": "the graph that was split differs from the model",
    "SK703": "the model differs from itself",
    "SK801": "the split cannot run on several ranks",
    "SK802": "a step was given arguments that the pipeline cannot use",
    "SK803": "a value at a border differs from the plan",
    "SK804": "the ranks differ in graph, plan, code, arguments, weights, optimizers, calls or batches",
    "SK805": "a rank of the pipeline failed",
    "SK806": "this version of torch cannot run it",
    "SK807": "the parts cannot be put on these devices",
    "SK808": "shared memory would lie on several devices",
    "SK901": "this cannot be drawn",
    "SK902": "the package for live views is missing",
    "SK903": "a schedule needs prices in seconds",
}


class SplitError(ValueError):
    """The base class of splitkit's errors.

    ``str(error)`` is ``"SK203: reason"`` followed by the remedy on its own line. The code is stable across releases
    and listed in ``docs/errors.md``.

    Attributes:
        code: ``"SK"`` and three digits.
        reason: what is wrong, naming the node or field.
        remedy: what would work.
        nodes: the names of the nodes concerned.
    """

    def __init__(self, code: str, reason: str, remedy: str = "", nodes: Iterable[object] = ()) -> None:
        self.code = code
        self.reason = reason
        self.remedy = remedy
        self.nodes = tuple(str(n) for n in nodes)
        super().__init__(f"{code}: {reason}" + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.reason, self.remedy, self.nodes)


class GraphError(SplitError):
    """The graph itself cannot be analysed (SK1xx)."""


class PlanError(SplitError):
    """The plan violates a dependence, a side effect or a rule of the graph (SK2xx)."""


class CycleError(PlanError):
    """Parts depend on each other in a cycle (SK203, SK311)."""


class PolicyError(SplitError):
    """The parameters of a policy are invalid for this graph (SK3xx)."""


class NoPlanError(PolicyError):
    """The policy is valid, but no plan meets its demands (SK303).

    Attributes:
        nearest: the plan that misses the demands by the least, if the search has one; it is not pickled.
        excess: the bytes by which that plan exceeds the budget.
    """

    nearest: object = None
    excess: int = 0


class CostError(SplitError):
    """The description of devices, links or costs is invalid (SK32x)."""


class ScheduleError(SplitError):
    """A pipeline schedule cannot be simulated (SK33x)."""


class CaptureError(SplitError):
    """A model could not be turned into a graph (SK4xx).

    Attributes:
        reached: the graph up to the point where the capture stopped, if it had begun: a graph module, for inspection
            only. It is not pickled.
        stopped_at: the line of Python where it stopped: ``model.py:12: if x.sum() > 0:``; empty if not known.
    """

    reached: Any = None
    stopped_at: str = ""


class FileError(SplitError):
    """A plan or report file cannot be used (SK5xx)."""


class PlanWarning(UserWarning):
    """A plan can be used, but its claim does not hold (SK509).

    Attributes:
        code: as in `SplitError`.
        reason: what differs, naming a node.
    """

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


class UsageError(SplitError):
    """The command line was used wrongly (SK60x)."""


class CheckError(SplitError, AssertionError):
    """A split computes different results than the whole (SK70x)."""


class PipelineError(SplitError, RuntimeError):
    """A split cannot run on several ranks, or one of them failed (SK8xx)."""


class ViewError(SplitError):
    """Something cannot be drawn (SK9xx)."""


def message_line(error: BaseException) -> str:
    """Return the first line of an exception's message; the name of its type if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def near(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names in ``known`` that are spelled nearly like ``name``, ignoring case, the nearest first."""
    spelled = {other.lower(): other for other in known}
    return [spelled[found] for found in get_close_matches(name.lower(), spelled, most, cutoff)]


def nearest(name: str, known: Iterable[str], then: str = "", most: int = 1, cutoff: float = 0.6) -> str:
    """Return ``Did you mean gpt2?`` followed by ``then``, or only ``then`` if no name is near."""
    found = near(name, known, most, cutoff)
    return f"Did you mean {', '.join(found)}? {then}".rstrip() if found else then


def listed(names: Sequence[object], most: int) -> str:
    """Join names as ``a, b, c and 4 more``, with at most ``most`` of them written out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"
