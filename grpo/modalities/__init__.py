"""One folder per kind of step: how its policies are made, loaded, drawn from and trained."""
