"""Shows a plan: a row a part, tables; changes nothing."""
