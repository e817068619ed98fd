"""Draws still pictures: SVG without styles, ids or scripts, which every viewer shows."""
