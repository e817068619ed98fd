"""Division of one given order of units into stages: balanced blocks, and borders that have a price."""
