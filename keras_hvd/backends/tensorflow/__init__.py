"""What keras_hvd does with TensorFlow: collectives, gradients, saving and devices."""
