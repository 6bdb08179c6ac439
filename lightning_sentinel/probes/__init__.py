"""Statistics of modules while they compute: a registry of what to measure in which kind of module.

See ``docs/probes.md``. Your own module kinds are registered with :func:`register_probe`; the ones of torch are built in.
"""

from .registry import Probe, probe_of, register_probe

__all__ = ["Probe", "probe_of", "register_probe"]
