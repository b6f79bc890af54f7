"""`khvdrun --diagnose`: what this machine gives a job, measured, and what to change.

Like all of the launcher it works without TensorFlow, which would take longer to import
than everything here takes together.
"""
