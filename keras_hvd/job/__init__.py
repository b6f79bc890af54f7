"""This process in its job: libraries, settings, its place, process sets, objects."""
