"""What runs in separate processes beside the run: the sandbox, and the bounded answerers.

Nothing else of the project is imported: a bare ``python -I`` must start in milliseconds and hold no
secret when the graded code is forked off it.
"""
