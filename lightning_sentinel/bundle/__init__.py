"""What an incident leaves behind, so that its step can be computed again later, elsewhere, on one device.

::

    <run_dir>/incidents/0003/    mode 0700, files 0600; written beside as .tmp-0003 and renamed
      manifest.json              sealed: SHA-256 and size of every file
      incident.json              sealed, replaced atomically: the incident with its verdict, as it is now
      run.json                   record of the step (every rank), losses before it, configuration, versions
      weights.pt                 rank 0's parameters at the gate of the step, before its update
      rank-00000.pt              this rank's micro-batches or their ids, random states, buffers, losses
      probe-00000.json           sealed, added after the rest: what DeepProbe measured on this rank at the incident

The parts: :mod:`.contents` collects at the gate, :mod:`.writing` writes in a thread, :mod:`.reading` checks and reads,
:mod:`.rebuild` makes model and data from the recorded configuration, :mod:`.replay` computes the step again.
"""
