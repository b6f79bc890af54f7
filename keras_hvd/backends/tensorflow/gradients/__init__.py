"""Reduction of a step's gradients in TensorFlow, and checks of it."""
