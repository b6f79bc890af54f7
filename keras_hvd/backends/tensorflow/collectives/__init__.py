"""The collectives as TensorFlow functions, one file each.

Each file has the public functions, then the op, then the gradient.
"""
