"""What depends on a framework, a folder each, and what these have in common."""
