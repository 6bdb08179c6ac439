"""Many processes: joining the process group again after a restart, and what the launcher knows of the job."""

from .elastic import init_process_group

__all__ = ["init_process_group"]
