"""Lets the processes of a job on several hosts find each other, and prove themselves.

`ranks.meet` is for ranks and `nodes.meet` for `khvdrun`. They use only Python's
standard library, and neither TensorFlow nor the engine. Callers bring TLS, if they want
it. The engine gets connected sockets, and knows nothing of secrets.
"""
