"""What depends on a framework, one folder each."""
