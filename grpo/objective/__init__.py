"""The objective as a chain of links on tensors, independent of models, files and parameters."""
