"""Remedies that no test carries out, each with the reason."""

from __future__ import annotations

LISTED: dict[tuple[str, str], str] = {
    # runtime
    ("SK806", "{...} install torch 2.13."): "installs another version of torch",
    ("SK802", "pip install 'transformers>=5'"): "installs a package",
    ("SK902", "pip install anywidget"): "installs a package",
}
"""(code, first words of the remedy) -> why it cannot be carried out mechanically."""

# plans, stages, checks
LISTED |= {
    ("SK301", "Fix or remove the package that provides it."): "repairs or removes an installed package",
    ("SK508", "Import the package that defines it first, or use the version of torch that wrote the file."): (
        "needs a package with ops of its own, or another version of torch"
    ),
    ("SK508", "Use the version of torch that wrote it; this is {...}."): "needs another version of torch",
    ("SK509", ""): "a warning, which has no field for a remedy",
    ("SK302", "See the policy's documentation."): "reads a page, for a policy of another package",
}

# checkpoints of layers
LISTED |= {
    ("SK307", "Use splitkit.apply, which carries out any plan, or a policy that does not save it."): (
        "no policy was found that still asks for it: what eager mode does not save stays in backward"
    ),
}

# models from configurations
LISTED |= {
    ("SK402", "pip install 'transformers>=5'"): "installs a package",
    ("SK402", "Install the package that it names."): "installs a package",
}

# captures
LISTED |= {
    ("SK401", "Use splitkit.capture(torch.export.export(model, args, kwargs))."): (
        "said where this was tried and works; no model was found that torch exports and splitkit does not"
    ),
}

# joint graphs on accelerators
LISTED |= {
    ("SK801", "Move the model and the inputs to {...} before capture_joint."): (
        "needs a device whose attention ops are not the CPU's: a graph from meta has those of the CPU"
    ),
}
