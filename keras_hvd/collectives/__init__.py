"""The collectives as TensorFlow functions: one file each, in the same inner order.

That order: the public functions, the op, the gradient.
"""
