"""How a process gets into its job: what its launcher says, and how the ranks meet."""
