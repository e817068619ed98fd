"""One process of ``splitkit doctor --device``: runs checks on devices and prints what they find, a JSON line each."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch

from splitkit.cli.selftest import figure_checks, number_checks, rank_checks
from splitkit.cli.selftest.check_runs import FAILED, SECONDS, Finding

Check = Callable[[Sequence[torch.device]], Iterable[Finding]]

CHECKS: dict[str, Check] = {**number_checks.CHECKS, **figure_checks.CHECKS, **rank_checks.CHECKS}
"""Name of a check -> what runs it; the names and their order are those of `SECONDS`."""


def run(name: str, devices: Sequence[torch.device]) -> bool:
    """Run a check and print its findings; return whether it raised an exception."""
    try:
        for finding in CHECKS[name](devices):
            print(json.dumps(finding.to_dict()), flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        line = Finding(name, "the whole check", said, "no error", FAILED, traceback.format_exc(limit=-8))
        print(json.dumps(line.to_dict()), flush=True)
        return True
    finally:
        print(json.dumps({"end": name}), flush=True)
    return False


def main() -> None:
    """Run the checks of the command line until one raises: what follows would run on what it left behind."""
    devices = [torch.device(device) for device in json.loads(sys.argv[1])]
    if devices[0].type != "cpu":
        torch.accelerator.set_device_index(devices[0])
    for name in json.loads(sys.argv[2]):
        if run(name, devices):
            break


assert CHECKS.keys() == SECONDS.keys()

if __name__ == "__main__":
    main()
