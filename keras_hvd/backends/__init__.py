"""The layer for frameworks: a folder for each, and the code that these share."""
