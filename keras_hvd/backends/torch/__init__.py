"""What depends on torch: the folders and files are named as TensorFlow's."""
