"""Runs a split that it is given, on several devices or ranks; decides nothing."""

from splitkit.runtime.devices import to_devices as to_devices
from splitkit.runtime.pipeline import Pipeline as Pipeline
from splitkit.runtime.pipeline import StepResult as StepResult
from splitkit.runtime.pipeline import pipeline as pipeline
