"""Tools for stored trajectories, which runs never import: verification, exports, other loops."""
