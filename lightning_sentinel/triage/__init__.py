"""Finds the cause of an incident by experiments: replays of the step, and comparisons of state, plan and ranks."""

from __future__ import annotations

from .verdict import investigate

__all__ = ["investigate"]
