"""The names of the files in the folder of a recording, and who writes each."""

TIMES = "times"
"""Rank 0's engine: where the time went."""

RANKS = "ranks"
"""Each rank of a host: how far it is."""

SERIES = "series"
"""Rank 0: samples and loss over time."""

FACTS = "facts.json"
"""Rank 0: settings, versions, and who takes part."""

COMMAND = "command"
"""`khvdrun`: what it runs."""

SCALING = "scaling"
"""`khvdrun --scaling`: what the job is for, "train" or "meet"."""
