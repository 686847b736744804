"""The command line of a checkout, ``python -m cli``; an installation has it as ``lit-dlm``."""

from lit_dlm.cli import COMMANDS, main

__all__ = ["COMMANDS", "main"]

if __name__ == "__main__":
    main()
