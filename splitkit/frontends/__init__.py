"""The way in from torch and out to it: export, symbolic trace, joint capture, ``torch.compile``; its private API."""
