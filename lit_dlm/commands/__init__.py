"""Commands of ``lit-dlm``, a module each; ``cli.py`` has the table."""
