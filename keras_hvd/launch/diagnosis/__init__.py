"""`khvdrun --diagnose`: measures this machine's speed and limits, and advises.

Like all of the launcher it does not import TensorFlow, which would take longer than the
whole diagnosis.
"""
