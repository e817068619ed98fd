"""The formats of vLLM and SGLang: how many layers each rank has, in an environment variable.

Read: ``get_pp_indices`` in vllm-project/vllm ``vllm/distributed/utils.py`` and sgl-project/sglang
``python/sglang/srt/distributed/utils.py`` (1107be1): as many numbers as ranks, their sum the number of layers. The
embedding is on the first rank, norm and head on the last.
"""

from __future__ import annotations

import re
from functools import partial

from splitkit.exports.carried_plan import CarriedPlan, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.text_parsing import no_such_text, whole_numbers


def _write(tool: str, variable: str, flag: str, carried: CarriedPlan) -> str:
    if len(carried.sequence.lists) > 1:
        raise cannot_carry(
            tool,
            f"the model has the lists of blocks {', '.join(carried.sequence.lists)}, and {variable} counts one list",
            "Export to accelerate or torch.",
        )
    numbers = ",".join(map(str, carried.blocks))
    return f'export {variable}="{numbers}"\n# {flag} {carried.stages}\n'


def _read(tool: str, variable: str, text: str) -> StagesInText:
    found = re.search(rf"{variable}\s*=\s*[\"']?([0-9, ]+)", text)
    numbers = whole_numbers(found[1] if found else text)
    example = f'{variable}="9,8,8,7"'
    if numbers is None:
        raise no_such_text(tool, "it has no list of numbers of layers", example)
    if 0 in numbers:
        raise no_such_text(tool, "a rank has no layer, and the parts of a plan are not empty", example)
    return StagesInText(blocks=numbers)


def _format(name: str, tool: str, variable: str, flag: str) -> ExportFormat:
    return ExportFormat(
        name=name,
        tool=tool,
        where=f"the environment of every rank, next to {flag}",
        level="blocks",
        write=partial(_write, tool, variable, flag),
        read=partial(_read, tool, variable),
        known_by=rf"{variable}",
        ties="ends",
        use="serving",
        example=f'{variable}="9,8,8,7"',
    )


VLLM = _format("vllm", "vLLM", "VLLM_PP_LAYER_PARTITION", "vllm serve MODEL --pipeline-parallel-size")
SGLANG = _format("sglang", "SGLang", "SGLANG_PP_LAYER_PARTITION", "python -m sglang.launch_server --pp-size")
