"""A small language model, its data, and faults in its real computation, for measuring what the triage makes of them."""
