"""The way of a process into its job: its launcher's variables, and the rendezvous."""
