"""Loss functions; each returns a total and the parts that are logged."""
