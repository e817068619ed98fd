"""The engine carries out plans: it completes and checks them, writes the modules of the parts, and inlines them again.

It decides nothing. Only this package builds graphs.
"""
