"""`khvdrun --diagnose`: measures what this machine gives a job, and advises.

Like all of the launcher it does not import TensorFlow, which would take longer than the
whole diagnosis.
"""
