"""From artifacts to numbers, figures and one self-contained page."""
