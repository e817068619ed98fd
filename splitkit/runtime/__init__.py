"""Runs a split that it is given, on several devices or ranks; decides nothing."""

from splitkit.runtime.agreement import planned_once as planned_once
from splitkit.runtime.devices import to_devices as to_devices
from splitkit.runtime.pipeline import Pipeline as Pipeline
from splitkit.runtime.pipeline import PipelineStep as PipelineStep
from splitkit.runtime.pipeline import pipeline as pipeline
from splitkit.runtime.savestages import save_stages as save_stages
from splitkit.runtime.stagefolder import StageFolder as StageFolder
from splitkit.runtime.stagefolder import open_stages as open_stages
from splitkit.runtime.torchstages import form_output as form_output
from splitkit.runtime.torchstages import reduced_ties as reduced_ties
from splitkit.runtime.torchstages import stage as stage
