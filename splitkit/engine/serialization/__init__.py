"""Convert GraphModules to JSON-ready data and back; the data contains no code."""
