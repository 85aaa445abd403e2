"""Vision-language models of transformers; a step is a token of the answer about an image."""
