"""`keras_hvd.Strategy`: a `tf.distribute.Strategy` whose replicas are the ranks."""
