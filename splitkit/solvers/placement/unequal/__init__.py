"""Devices between which links differ: placements by what each value takes over the link that it really crosses."""
