"""The gradients of a step: how TensorFlow's are reduced, and what watches over it."""
