"""A canary before a long run: a short pilot of the real configuration, twice, with tightened thresholds.

The *clean* leg must stay without an incident. The *drill* leg is the same run with faults let loose on it, one after the
other; each must be seen, named, answered as it should be, and recovered from. One page says what happened.

:mod:`.drill` says which faults and what is right for each, :mod:`.judge` compares the journals, :mod:`.page` writes the page,
:mod:`.app` runs a Hydra application, :mod:`.pilot` a Python function.
"""
