"""trajectories."""
