"""The half of the sandbox that runs in the sample's own processes; standard library only.

These modules import one another relatively and nothing else of the project, because they run in a
bare ``python -I -S`` that must start in milliseconds and must hold no secret when the graded code
is forked off it.
"""
