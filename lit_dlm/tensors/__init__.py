"""Tensor functions; no model, no framework but torch.

Shape legend, used in every docstring of the project:

====  =========================================================
B     rows of a batch (samples)
L     canvas length, prompt and response together
P     prompt length (of a padded batch: its common prompt columns)
G     response length, ``L = P + G``
K     columns requested from a forward, or events of a trajectory
T     decode steps
V     vocabulary size
D     width of a hidden state
H     hidden snapshots per position
F     features per position
====  =========================================================

In every boolean mask ``True`` means "is in the set" and the name says which set.
Steps and positions count from 0; a commit step of -1 means "not committed".
"""
