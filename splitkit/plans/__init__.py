"""Plans: which parts compute which nodes. This package orders, rewrites, saves and loads plans; it edits no graph."""
