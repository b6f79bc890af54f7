"""Reduction of a step's gradients in torch, and checks of it."""
