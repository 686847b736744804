"""Configuration: files are composed, references resolved, types parsed; see :mod:`.files`."""
