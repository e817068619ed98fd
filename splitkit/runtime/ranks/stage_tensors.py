"""The parameters and buffers of a rank's stages, under the names of the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.fsdp import shard_like
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.weight_agreement import tensors_of_stages


class StageTensors:
    """Gives access to the tensors of a rank's stages; the base of `splitkit.runtime.Pipeline`.

    Attributes:
        split: the split, or the stages on disk.
        stages: the numbers of this rank's stages.
    """

    split: Split | StageFolder
    stages: tuple[int, ...]
    _chain: Chain
    _empty: nn.Parameter
    _weights_changed: bool

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the graph that was split."""
        return {name: p for name, p in self.named_tensors().items() if isinstance(p, nn.Parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer.

        A rank without parameters has a single empty one, because torch's optimizers refuse an empty list.
        """
        return list({id(p): p for p in self.named_parameters().values()}.values()) or [self._empty]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's share of the model's state dict, under the names of the unsplit model."""
        return {name: t.detach() for name, t in self.saved_tensors().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's parameters and buffers from the state dict of the unsplit model, or of any pipeline of it.

        Raises:
            PipelineError: SK802 for a missing name or a different shape; nothing is loaded then.
        """
        own = self.saved_tensors()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                what = f"has the shape {list(state[name].shape)}" if name in state else "is not in the state"
                raise PipelineError(
                    "SK802", f"{name}{list(tensor.shape)} {what}", "Load a state of the model that was captured."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(shard_like(tensor, state[name]))
        self._weights_changed = True

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by their names in the graph that was split."""
        return tensors_of_stages(self._chain, self.stages)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return `named_tensors` without non-persistent buffers and constants of the graph."""
        module, names = self.split.module, self.split.qualified_names
        saved = {names.get(name, name) for name in module.state_dict()}
        return {name: t for name, t in self.named_tensors().items() if name in saved}
