"""The runtime uses torch's interfaces that do not name a vendor: what runs on CUDA runs on any accelerator."""

from __future__ import annotations

import ast
from pathlib import Path

import splitkit.runtime

VENDORS = {"cuda", "xpu", "mps", "hpu", "npu", "mtia", "is_cuda", "is_xpu", "is_mps", "nccl", "is_nccl_available"}
RUNTIME = Path(splitkit.runtime.__file__).parent
FILES = [*RUNTIME.rglob("*.py"), *(RUNTIME.parent / "cli" / "commands").glob("train*.py")]


def vendors(source: str) -> set[str]:
    """The attributes, imports and strings of a source that name a vendor."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            found += [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return VENDORS.intersection(found)


def test_no_vendor_is_named():
    named = {path.name: found for path in FILES if (found := vendors(path.read_text()))}
    # methods of tensors in users' graphs, such as x.cuda(); and a generator that takes no index of a device
    assert named == {"device_map.py": {"cuda", "xpu", "mtia"}, "accelerators.py": {"mps"}}
    assert len(FILES) > 40


def test_a_vendor_is_seen():
    assert vendors("torch.cuda.Stream()\nfrom torch.cuda import Event\nbackend = 'nccl'") == {"cuda", "nccl"}
    assert vendors("from torch import mps") == {"mps"}
