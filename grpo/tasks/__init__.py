"""One file per data set: prompts, and solutions to warm a base policy up on."""
