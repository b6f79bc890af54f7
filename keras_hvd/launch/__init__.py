"""`khvdrun`, the command that starts a job's ranks on this machine and ends them.

Nothing here imports TensorFlow or Keras.
"""
