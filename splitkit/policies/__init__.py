"""Policies: frozen dataclasses that decide which part computes which node."""

from splitkit.policies.by_device import ByDevice
from splitkit.policies.by_name import ByName
from splitkit.policies.random import Random
from splitkit.policies.round_robin import RoundRobin
from splitkit.policies.stages import Stages

__all__ = ["ByDevice", "ByName", "Random", "RoundRobin", "Stages"]
