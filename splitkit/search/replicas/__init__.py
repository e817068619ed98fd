"""The search for stages that may be replicated over several devices each."""
