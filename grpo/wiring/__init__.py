"""The only place where parameters become components."""
