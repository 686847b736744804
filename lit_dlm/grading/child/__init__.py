"""What runs in processes of its own, beside the run: the sandbox, and the bounded answerers.

These modules import one another relatively and nothing else of the project, because they run in a
bare ``python -I`` that must start in milliseconds and must hold no secret when the graded code is
forked off it.
"""
