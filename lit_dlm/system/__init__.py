"""Files, terminals and checks of options."""
