"""The distributed optimizer and tape, which reduce gradients over all ranks."""
