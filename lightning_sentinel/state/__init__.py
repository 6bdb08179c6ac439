"""Capture and restore of the training state: weights, optimizer, loops, data position, random state, callbacks."""
