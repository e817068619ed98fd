"""The search for parts of given devices, in any number of pieces per device."""
