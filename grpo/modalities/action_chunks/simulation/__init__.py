"""Robot simulators, run in separate processes."""
