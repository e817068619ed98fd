"""Placement on devices whose links differ: each value is priced by the link that it really crosses."""
