"""From a finished profile to a proposed arm, and from a finished run to how well that was meant."""
