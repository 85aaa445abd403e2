"""Construction of components from parameters; no other package does this."""
