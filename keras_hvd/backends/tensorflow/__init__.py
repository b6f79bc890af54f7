"""The TensorFlow backend: collectives, gradients, saving and devices."""
