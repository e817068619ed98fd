"""Describe one link between two devices, and the presets: latency and bandwidth of one direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitkit.checks import is_number, plain_name, shown
from splitkit.errors import CostError, nearest

SLOWEST, LONGEST_WAIT = 1e-12, 1e12
"""Limits of a link's bandwidth (bytes per second) and latency (seconds): beyond them, sums of times lose precision."""


@dataclass(frozen=True)
class Link:
    """One direction of a connection between two devices.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds before the first byte arrives.
        source: where the figures come from.

    Raises:
        CostError: SK322 for impossible figures.
    """

    bandwidth: float
    latency: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not is_number(self.bandwidth) or float(self.bandwidth) < SLOWEST:
            text = f"bandwidth is {shown(self.bandwidth)}"
            raise CostError("SK322", text, f"Give a positive number of bytes a second, {SLOWEST} or more.")
        if not is_number(self.latency) or float(self.latency) > LONGEST_WAIT:
            raise CostError(
                "SK322", f"latency is {shown(self.latency)}", f"Give seconds, 0 or more, {LONGEST_WAIT:.0e} at most."
            )
        for name in ("bandwidth", "latency"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def expression(self) -> str:
        """The call that makes this link again, in the expression of a policy."""
        return f"Link({self.bandwidth!r}, {self.latency!r}, {self.source!r})"

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that one message takes."""
        return self.latency + nbytes / self.bandwidth


# Bandwidths are peaks of one direction; the vendors' figures for NVLink add up both. No data sheet gives latencies:
# these are round figures of the order that p2pBandwidthLatencyTest (NVLink, PCIe) and RDMA through a switch show.
_NVIDIA = "https://www.nvidia.com/en-us/data-center/nvlink/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_PCI = "https://pcisig.com/specifications: 16 lanes, 128b/130b"
_IEEE = "https://standards.ieee.org/ieee/802.3/10422/"
PRESETS: Mapping[str, Link] = {
    "nvlink2": Link(150e9, 2e-6, _NVIDIA),  # V100: 300 GB/s both ways
    "nvlink3": Link(300e9, 2e-6, _NVIDIA),  # A100: 600 GB/s both ways
    "nvlink4": Link(450e9, 2e-6, _NVIDIA),  # H100, H200: 900 GB/s both ways
    "nvlink5": Link(900e9, 2e-6, _NVIDIA),  # B200: 1800 GB/s both ways
    "infinity-fabric": Link(64e9, 2e-6, _AMD),  # MI300X to each other one: 128 GB/s both ways
    "pcie3": Link(8e9 * 16 * 128 / 130 / 8, 5e-6, _PCI),  # 15.8 GB/s
    "pcie4": Link(16e9 * 16 * 128 / 130 / 8, 5e-6, _PCI),  # 31.5 GB/s
    "pcie5": Link(32e9 * 16 * 128 / 130 / 8, 5e-6, _PCI),  # 63.0 GB/s
    "ethernet100": Link(12.5e9, 10e-6, _IEEE),
    "ethernet400": Link(50e9, 10e-6, _IEEE),
    "shared-memory": Link(10e9, 1e-6, "generic: one core copies from DDR4-3200 to the same"),
}
"""By name."""


def find_link(link: object) -> Link:
    """Return the given link, or the preset of a name; case, hyphens and spaces do not matter."""
    if isinstance(link, Link):
        return link
    if isinstance(link, str):
        names = {plain_name(name): name for name in PRESETS}
        if plain_name(link) in names:
            return PRESETS[names[plain_name(link)]]
        hint = nearest(link, PRESETS) or f"Known are {', '.join(PRESETS)}; or give a Link."
        raise CostError("SK322", f"no link is called {link!r}", hint)
    raise CostError("SK322", f"{shown(link)} is not a link", f"Give a Link, or one of {', '.join(PRESETS)}.")
