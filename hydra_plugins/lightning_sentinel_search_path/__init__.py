"""Puts the suite's configuration groups (``callbacks/sentinel``, ``policy``) on every Hydra application's search path."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningSentinelSearchPath(SearchPathPlugin):
    """Found by Hydra itself because it lives in the ``hydra_plugins`` namespace package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning-sentinel", path="pkg://lightning_sentinel.conf")
