"""What ``splitkit doctor --device`` tries on the devices of a machine, each check in a process that may fail alone."""
