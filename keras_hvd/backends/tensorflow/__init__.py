"""What keras_hvd does with TensorFlow: collectives, variables, saving and devices."""
