"""Collectives of torch's tensors, which are eager."""
