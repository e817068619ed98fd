"""Runs a split on several devices or ranks. The plan decides what runs where."""

from splitkit.runtime.devices.on_devices import to_devices
from splitkit.runtime.folder.load import open_stages
from splitkit.runtime.folder.save import save_stages
from splitkit.runtime.folder.training_checkpoint import open_checkpoints
from splitkit.runtime.folder.whole_model import save_pretrained
from splitkit.runtime.generation.encoder_caches import decoder_cache, decoder_memory
from splitkit.runtime.ranks.measurements import StepRecorder
from splitkit.runtime.ranks.pipeline import pipeline
from splitkit.runtime.ranks.pipeline_module import PipelineModule
from splitkit.runtime.ranks.rank_agreement import planned_once
from splitkit.runtime.ranks.torch_stages import form_output, reduced_ties, stage

__all__ = [
    "PipelineModule",
    "StepRecorder",
    "decoder_cache",
    "decoder_memory",
    "form_output",
    "open_checkpoints",
    "open_stages",
    "pipeline",
    "planned_once",
    "reduced_ties",
    "save_pretrained",
    "save_stages",
    "stage",
    "to_devices",
]
