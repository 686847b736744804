"""``lit-dlm profile``: speed and quality of policies, budgets of steps and caches on one task."""

from lit_dlm.profile.grid import Grid
from lit_dlm.profile.points import ProfilePoint, profile_points, write_profile

__all__ = ["Grid", "ProfilePoint", "profile_points", "write_profile"]
