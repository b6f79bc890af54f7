"""The distributed optimizer and tape: gradients that are reduced over all ranks."""
