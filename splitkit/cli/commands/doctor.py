"""``splitkit doctor``: checks the installation and the machine; with ``--device``, what splitkit does on a device."""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import splitkit as sk
from splitkit.cli import distribution
from splitkit.cli.outcome import Lines, Outcome
from splitkit.cli.selftest.check_runs import FAILED, SECONDS, Finding, run_checks
from splitkit.errors import UsageError
from splitkit.units import size
from splitkit.view.tables import table

NEEDED = {"torch": (2, 11), "numpy": (), "scipy": (), "networkx": (), "rich": (), "shtab": ()}
OPTIONAL = ("transformers",)


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was checked.
        found: what was found.
        ok: whether it works with splitkit.
        needed: whether splitkit needs it.
        remedy: what to do if it is not ok.
    """

    name: str
    found: str
    ok: bool = True
    needed: bool = True
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.ok:
            return "ok"
        return f"{'needed' if self.needed else 'optional'}: {self.remedy}"


def run(args: Namespace) -> Outcome:
    """Run ``splitkit doctor``."""
    if args.device:
        return _try_devices(args)
    python = Check("python", platform.python_version(), remedy="splitkit needs 3.11")
    own = Check("splitkit", f"{sk.__version__} in {Path(sk.__file__).parent}")
    checks = [python, own, *_command(), *_name_clash(), *map(_package, NEEDED)]
    checks += [_package(name, needed=False) for name in OPTIONAL]
    checks += [*_machine(), _self_test(args.debug)]
    healthy = all(c.ok for c in checks if c.needed)
    data = {"command": "doctor", "ok": healthy, "checks": [asdict(c) for c in checks]}
    return Outcome(data, _text(checks, healthy), 0 if healthy else 1, {args.output: data} if args.output else {})


def _text(checks: list[Check], healthy: bool) -> Lines:
    rows = [(c.name, c.found, c.verdict) for c in checks]
    verdict = "everything that splitkit needs is here" if healthy else "something that splitkit needs is missing"
    if find_spec("rich"):
        return [table(("what", "found", "verdict"), rows), "", verdict]
    return [*map("  ".join, rows), verdict]


def _try_devices(args: Namespace) -> Outcome:
    """Run the checks of devices, each of which is shown as soon as it is done."""
    devices = [_device(name) for name in args.device.split(",")]
    start = monotonic()
    found = run_checks(devices, lambda finding: print(_line(finding), file=sys.stderr, flush=True), [*SECONDS])
    counts = Counter(finding.verdict for finding in found)
    seconds = round(monotonic() - start)
    data: dict[str, Any] = {"command": "doctor", "ok": not counts[FAILED], "devices": devices, "seconds": seconds}
    data |= {"machine": _versions(devices), "findings": [asdict(finding) for finding in found]}
    rows = [(f.check, f.what, f.figure, f.limit, f.verdict) for f in found]
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    text = f"{', '.join(devices)}: {verdicts}, in {seconds} s"
    shown: Lines = [table(("check", "what", "found", "wanted", "verdict"), rows), "", text]
    return Outcome(data, shown, int(counts[FAILED] > 0), {args.output: data} if args.output else {})


def _line(finding: Finding) -> str:
    wanted = f" ({finding.limit})" if finding.limit else ""
    return f"{finding.check}, {finding.what}: {finding.figure}{wanted}: {finding.verdict}"


def _device(name: str) -> str:
    """Return a device of this machine, with its index.

    Raises:
        UsageError: SK602 if there is no such device.
    """
    import torch

    from splitkit.runtime.devices.accelerators import with_index

    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise UsageError("SK602", f"--device {name}: torch cannot use it: {said}", "Try --device cpu.") from error
    return "cpu" if device.type == "cpu" else str(with_index(device))


def _versions(devices: list[str]) -> dict[str, str]:
    """Return what a reader of the figures must know of the machine."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "splitkit": sk.__version__}
    if any(name.startswith("cuda") for name in devices):
        found |= {name: torch.cuda.get_device_name(name) for name in devices if name.startswith("cuda")}
        found["cuda"] = str(torch.version.cuda)
    return found | {"processor": platform.processor() or platform.machine()}


def _command() -> list[Check]:
    """Return what the command ``splitkit`` starts: of two packages that have one, the last that was installed."""
    found = distribution.installed_command()
    if found is None:
        return []
    file, module = found
    remedy = f"it is of another package: {distribution.REMEDY}; until then use python -m splitkit"
    return [Check("command", f"{file} starts {module}", module == "splitkit.__main__", True, remedy)]


def _name_clash() -> list[Check]:
    """Return a failed check if another distribution has overwritten files of this package."""
    clash = distribution.other()
    return [] if clash is None else [Check("name clash", clash, False, True, distribution.REMEDY)]


def _package(name: str, needed: bool = True) -> Check:
    least = NEEDED.get(name, ())
    wanted = f"pip install '{name}{'>=' + '.'.join(map(str, least)) if least else ''}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "not installed", False, needed, wanted)
    release = tuple(int(number) for number in found.split(".")[:2] if number.isdigit())  # (2, 13) of 2.13.0+cpu
    return Check(name, found, release >= least, needed, wanted)


def _machine() -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [Check("cores", str(cores)), Check("memory", _memory())]
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [*found, Check("import torch", str(error), False, True, "reinstall torch")]
    devices = ["cpu"] + [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    gloo = dist.is_available() and dist.is_gloo_available()
    remedy = "pipelines over several processes need torch.distributed with gloo"
    return [*found, Check("devices", ", ".join(devices)), Check("gloo", "yes" if gloo else "no", gloo, False, remedy)]


def _memory() -> str:
    try:
        return size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return "unknown"


def _self_test(debug: bool) -> Check:
    """Split a tiny model in two and compare it with the unsplit one."""
    try:
        import torch
        from torch import nn

        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.BatchNorm1d(4), nn.Linear(4, 2))
        x = torch.randn(3, 4)
        sk.compare(model, sk.split(sk.capture(model, x), sk.policies.Stages(2)), x).raise_if_different()
    except Exception as error:
        if debug:
            raise
        return Check("self-test", f"failed: {type(error).__name__}: {error}", False, True, "run it with --debug")
    return Check("self-test", "a tiny model split in two computes the same as the unsplit one")
