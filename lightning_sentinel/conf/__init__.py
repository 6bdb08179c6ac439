"""The suite's Hydra groups. On the search path of every Hydra application through the ``hydra_plugins`` package."""
