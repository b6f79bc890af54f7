"""What all of keras_hvd stands on: libraries, settings, the job and its sets."""
