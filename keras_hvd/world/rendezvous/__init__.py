"""How the processes of a job on several hosts find each other, and prove who they are.

`ranks.meet` is for ranks and `nodes.meet` for `khvdrun`. Only Python's standard library
is used, and neither TensorFlow nor the engine; callers bring TLS, if they want it. The
engine gets connected sockets, and knows nothing of secrets.
"""
