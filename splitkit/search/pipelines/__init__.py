"""Pipeline stages of a joint graph together with what each stage saves and recomputes."""
