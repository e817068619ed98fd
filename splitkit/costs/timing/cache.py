"""Cache measured costs in a JSON file, by machine and by op, shapes, dtypes and modes.

::

    {"splitkit_cost_cache": 1,
     "environments": {"torch 2.13.0, Xeon, 2 threads, float32 matmul highest":
                      {"aten.mm.default(float32[2,3], float32[3,4])": [1.2e-06, 0]}}}
"""

from __future__ import annotations

import json
import math
import os
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from splitkit import files
from splitkit.costs.timing.call_timing import Record
from splitkit.errors import FileError

FIELD, SCHEMA = "splitkit_cost_cache", 1
Entries = dict[str, dict[str, Record]]
"""Environment -> key of an op -> its record."""


def default_path() -> Path:
    """Return ``$XDG_CACHE_HOME/splitkit/costs.json``; the variable defaults to ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "splitkit" / "costs.json"


def environment(device: torch.device) -> str:
    """Return a text of what times depend on besides the op: torch, the device, threads, the precision of products."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), f"cuda {torch.version.cuda}"]
        parts += ["cudnn.benchmark"] if torch.backends.cudnn.benchmark else []
    else:
        parts += [_cpu_name(), f"{torch.get_num_threads()} threads", "timed in place"]
    return ", ".join([*parts, f"float32 matmul {torch.get_float32_matmul_precision()}"])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class CostCache:
    """The records of one environment: those of a file and new ones.

    The file is read once. `save` merges the new records into the file's current records and replaces the file. If two
    processes write at the same moment, one may lose its records, but the file stays valid.

    Raises:
        FileError: SK504 if the file exists and cannot be read.
    """

    def __init__(self, path: Path | None, environment: str) -> None:
        self.path, self.environment = path, environment
        self._new: dict[str, Record | None] = {}  # None: remove it from the file
        self._written: set[str] = set()
        self._damaged = False
        self._known = self._read().get(environment, {})

    def get(self, key: str) -> Record | None:
        """Return the record of an op, if there is one."""
        return self._known.get(key)

    def put(self, key: str, record: Record) -> None:
        """Remember a record, which `save` writes to the file.

        A record of a busy machine is kept in this object only, and `save` removes this object's earlier record.
        """
        self._known[key] = record
        self._new[key] = None if record.busy else record

    def save(self) -> None:
        """Write new records atomically; if the file cannot be written, warn and go on without it."""
        if self.path is None or not (self._new or self._damaged):
            return
        try:
            entries = read_cost_file(self.path)
        except (OSError, ValueError):
            entries = {}
        own = entries.setdefault(self.environment, {})
        for key, record in self._new.items():
            if record is not None:
                own[key] = record
            elif key in self._written:
                own.pop(key, None)
        self._written |= self._new.keys()
        try:
            write_cost_file(self.path, entries)
        except OSError as error:
            warnings.warn(f"measured costs are not kept: cannot write {str(self.path)!r}: {error}", stacklevel=2)
            self.path = None
        self._new, self._damaged = {}, False

    def _read(self) -> Entries:
        if self.path is None:
            return {}
        try:
            return read_cost_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise FileError(
                "SK504",
                f"cannot read {str(self.path)!r}: {error.strerror or error}",
                "Name a file for the cache, or go without: cache=False.",
            ) from error
        except ValueError as error:
            self._damaged = True
            warnings.warn(f"{self.path} is not a cost cache ({error}); it is ignored and rewritten", stacklevel=2)
            return {}


def read_cost_file(path: Path) -> Entries:
    """Return the records of a file.

    Raises:
        ValueError: the file is not a cost cache.
        OSError: the file cannot be read.
    """
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, dict) or data.get(FIELD) != SCHEMA or not isinstance(data.get("environments"), dict):
        raise ValueError(f"it does not say {FIELD}: {SCHEMA}")
    return {name: _records(found) for name, found in data["environments"].items()}


def _records(found: object) -> dict[str, Record]:
    if not isinstance(found, dict):
        raise ValueError("an environment is not an object")
    return {key: _record(value) for key, value in found.items()}


def _record(value: object) -> Record:
    match value:
        case [bool(), _] | [_, bool()]:
            pass
        case [int() | float() as seconds, int() as workspace] if 0 <= seconds < math.inf and 0 <= workspace < 2**63:
            with suppress(OverflowError):  # an integer that no float can hold
                return Record(float(seconds), workspace)
    raise ValueError(f"{value!r:.40} is not a record")


def write_cost_file(path: Path, entries: Mapping[str, Mapping[str, Record]]) -> None:
    """Write a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    found = {
        name: {key: [record.seconds, record.workspace] for key, record in sorted(records.items())}
        for name, records in sorted(entries.items())
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_file(path, json.dumps({FIELD: SCHEMA, "environments": found}, indent=1))
