"""The formats that `splitkit.export` writes and `splitkit.import_plan` reads, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from splitkit.errors import FileError, listed, nearest
from splitkit.exports.deepspeed import DEEPSPEED
from splitkit.exports.device_maps import ACCELERATE, TRANSFORMERS
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.galvatron import GALVATRON
from splitkit.exports.layer_partition import SGLANG, VLLM
from splitkit.exports.megatron import MEGATRON
from splitkit.exports.nnscaler import NNSCALER
from splitkit.exports.onnx_stages import ONNX
from splitkit.exports.torch_pipelining import TORCH
from splitkit.exports.torchtitan import TORCHTITAN

FORMATS: Mapping[str, ExportFormat] = {
    one.name: one
    for one in (
        TORCH,
        TORCHTITAN,
        MEGATRON,
        DEEPSPEED,
        ACCELERATE,
        TRANSFORMERS,
        VLLM,
        SGLANG,
        GALVATRON,
        NNSCALER,
        ONNX,
    )
}


def format_named(name: object) -> ExportFormat:
    """Return the format of a name, in any case.

    Raises:
        FileError: SK521 if there is none; lists them.
    """
    found = FORMATS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        known = f"Known: {', '.join(FORMATS)}."
        remedy = nearest(name, FORMATS, known) if isinstance(name, str) else known
        raise FileError("SK521", f"no export format is called {name!r:.80}", remedy)
    return found


def format_of(text: str) -> ExportFormat:
    """Return the format of a text, by what only its texts have.

    Raises:
        FileError: SK521 if it looks like the text of no format, or of several.
    """
    fits = [one for one in FORMATS.values() if re.search(one.known_by, text)]
    if len(fits) != 1:
        like = f"of {listed([one.name for one in fits], 3)}" if fits else "of no format"
        raise FileError("SK521", f"the text looks like one {like}", f"Name it with form=: {', '.join(FORMATS)}.")
    return fits[0]
