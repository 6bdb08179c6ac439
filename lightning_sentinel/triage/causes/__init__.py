"""What can be the cause, one file for each kind of experiment; each rung gives a verdict or None to climb on."""
