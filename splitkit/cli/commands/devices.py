"""``splitkit devices``: lists the devices and links that other commands know by name."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from splitkit.cli.outcome import Lines, Outcome
from splitkit.cli.syntax.device_list import DeviceList
from splitkit.hardware.device_specs import Device, devices
from splitkit.hardware.link_specs import PRESETS
from splitkit.units import duration, quantity, size
from splitkit.view.tables import table

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
SPARE = ("tf32", "float16", "float8", "float32", "bandwidth", "bfloat16")
"""What a narrow terminal leaves out, in this order."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit devices``."""
    known = devices()
    links = {name: DeviceList((device,)).usual_links for name, device in known.items()}
    data = {
        "devices": [asdict(device) | {"links": links[name]} for name, device in known.items()],
        "links": [asdict(link) | {"name": name} for name, link in PRESETS.items()],
    }
    titles = ("device", "memory", "bandwidth", *DTYPES, "usual link")
    cells = [_cells(device, links[name]) for name, device in known.items()]
    of_links = [(name, _rate(link.bandwidth), duration(link.latency)) for name, link in PRESETS.items()]
    text: Lines = [
        table(titles, cells, titles[1:-1], "devices: FLOP/s of dense products by dtype", spare=SPARE),
        "",
        table(("link", "one direction", "latency"), of_links, ("one direction", "latency"), "links"),
    ]
    return Outcome(data, text)


def _cells(device: Device, links: str) -> tuple[str, ...]:
    peaks = (f"{quantity(device.peak[dtype])}" if dtype in device.peak else "-" for dtype in DTYPES)
    return device.name, size(device.memory), _rate(device.bandwidth), *peaks, links


def _rate(bandwidth: float) -> str:
    return f"{quantity(bandwidth)}B/s"
