"""Devices and the links between them, as figures of data sheets; nothing here needs torch."""
