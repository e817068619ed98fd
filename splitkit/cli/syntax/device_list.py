"""Parses ``--devices``: ``4xh200``, ``h200,h200,a100``, ``2xh200,cpu``, or a TOML file that describes devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, repeat

from splitkit.checks import is_whole, plain_name
from splitkit.errors import CostError, UsageError
from splitkit.hardware.device_specs import Device, device_from_table, device_tables, devices, find_device
from splitkit.units import read_size

MOST = 1024
"""The most devices that a command plans for."""

_LINK_OF = {
    "cpu": "shared-memory",
    "v100": "nvlink2",
    "a100": "nvlink3",
    **dict.fromkeys(("h100", "h200"), "nvlink4"),
    "b200": "nvlink5",
    "mi300x": "infinity-fabric",
    "t4": "pcie3",
    "rtx-5090": "pcie5",
}
_OTHER_LINK = "pcie4"
_ITEM = re.compile(r"(?:(\d{1,99})x)?(.+)", re.ASCII)
_TURNED = re.compile(r"(.+)[x*:](\d{1,99})", re.ASCII)


@dataclass(frozen=True)
class DeviceList:
    """Devices to plan for.

    Attributes:
        devices: the devices in order.
        links: the name of the links between them, if a file gives one.
    """

    devices: tuple[Device, ...]
    links: str | None = None

    @property
    def alike(self) -> bool:
        """Whether all devices are of one kind."""
        return len(set(self.devices)) == 1

    @property
    def usual_links(self) -> str:
        """The usual link between such devices, or PCIe if their links differ."""
        links = {_LINK_OF.get(device.name, _OTHER_LINK) for device in self.devices}
        return links.pop() if len(links) == 1 else _OTHER_LINK

    @property
    def kinds(self) -> str:
        """The names of the kinds, each once."""
        return ", ".join(dict.fromkeys(device.name for device in self.devices))

    def __str__(self) -> str:
        names = [device.name for device in self.devices]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def device_counts(text: str) -> list[tuple[str, int]]:
    """Return the kinds of devices and the number of each.

    Raises:
        UsageError: SK601 if the text has another form, or names too many devices.
    """
    found = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or not _may_be_kind(match[2]) or (match[1] and not int(match[1])):
            raise UsageError("SK601", f"--devices {text}: {item!r} is not a kind of device", _instead(item))
        if nbytes := read_size(match[2]):
            reason = f"--devices {text}: {match[2]} says how much memory a device has, and not how fast it is"
            raise UsageError("SK601", reason, _of_memory(text, nbytes))
        found.append((match[2], int(match[1] or 1)))
    _require_few(text, sum(count for _, count in found))
    return found


def _may_be_kind(text: str) -> bool:
    """Return whether ``text`` may name a kind of device: it is not a number, file or call, nor ``h200x4``."""
    return not (text.isdigit() or text.endswith(".toml") or "(" in text or _turned_around(text))


def _turned_around(item: str) -> re.Match[str] | None:
    """Match ``h200x4``, which should be ``4xh200``; ``rtx3090`` is a kind."""
    match = _TURNED.fullmatch(item)
    return match if match and plain_name(match[1]) in map(plain_name, devices()) else None


def _instead(item: str) -> str:
    """Return what to write for an item that names no devices."""
    item = item.strip()
    if item.isascii() and item.isdigit():
        few = max(1, min(int(item), MOST))
        return f"Say which devices, such as --devices {few}xh200; or use --stages {few} for unspecified devices."
    if turned := _turned_around(item):
        return f"Write {max(1, min(int(turned[2]), MOST))}x{turned[1]}."
    if "(" in item:
        return "Give a policy to --policy in place of --devices."
    return "Write 4xh200, h200,h200,a100 or FILE.toml."


def _of_memory(text: str, nbytes: int) -> str:
    """Return what to write for a list with a device of which only the memory is given."""
    like = [name for name, device in devices().items() if 0.9 * nbytes <= device.memory <= 1.1 * nbytes]
    items = [match for item in text.split(",") if (match := _ITEM.fullmatch(item.strip()))]
    each = [match[2] for match in items for _ in range(int(match[1] or 1)) if read_size(match[2])]
    memory = ",".join(each) if len(set(each)) > 1 else each[0]
    stages = f"--stages {len(each)}" if len(each) > 1 else "--stages"
    kind = f"Name the kind, such as {like[0]} ({', '.join(like)} have about as much); or give" if like else "Give"
    return f"{kind} --memory {memory} with {stages} in place of --devices."


def is_file(text: str) -> bool:
    """Return whether the text names a file of devices."""
    return text.endswith(".toml") and "," not in text


def read_device_list(text: str) -> DeviceList:
    """Return the devices that the command line names.

    A file has the tables of `splitkit.costs.load_devices`. A table may also have the count of such devices, and the
    file the links between them::

        links = "nvlink4"

        [mine]
        count = 4
        peak = { float32 = 40e12 }
        bandwidth = 900e9
        memory = 48_000_000_000

    Raises:
        CostError: SK321 for an unknown device, SK320 for a file with no device or a bad one.
        FileError: SK504 for a file that cannot be read.
        UsageError: SK601 if the text has another form, or names too many devices.
    """
    if is_file(text):
        return devices_in_file(text)
    return DeviceList(
        tuple(chain.from_iterable(repeat(find_device(name), count) for name, count in device_counts(text)))
    )


def devices_in_file(path: str) -> DeviceList:
    """Return the devices that a file describes; raise the errors of `read_device_list`."""
    tables = device_tables(path)
    links = tables.pop("links", None)
    if links is not None and not isinstance(links, str):
        raise CostError("SK322", f"{path}: links is {links!r}", 'Name what connects the devices: links = "nvlink4".')
    numbers = {name: _count(path, name, table) for name, table in tables.items()}
    found = {name: device_from_table(path, name, table) for name, table in tables.items()}
    if not found:
        raise CostError("SK320", f"{path} describes no device", "Write one table per device; see load_devices.")
    _require_few(path, sum(numbers.values()))
    return DeviceList(tuple(chain.from_iterable(repeat(found[name], numbers[name]) for name in found)), links)


def _count(path: str, name: str, table: object) -> int:
    """Remove ``count`` from a device's table, and return it."""
    count = table.pop("count", 1) if isinstance(table, dict) else 1
    if not is_whole(count, 1):
        raise CostError("SK320", f"{path}: count of {name} is {count!r}", "Give a whole number >= 1.")
    return count


def _require_few(text: str, number: int) -> None:
    if number > MOST:
        raise UsageError("SK601", f"--devices {text}: these are {number}", f"Name at most {MOST}.")
