"""The foundation of keras_hvd: libraries, settings, the job and its process sets."""
