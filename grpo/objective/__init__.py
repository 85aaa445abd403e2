"""The objective as a chain of links: tensors in, tensors out; no model, file or parameter."""
