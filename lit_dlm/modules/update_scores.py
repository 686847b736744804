"""What an RL step's updates log, however its rows were dealt to batches and processes."""

from __future__ import annotations

from torch import Tensor, nn

from lit_dlm.metrics.value_fit import Quotient, ValueFit


class UpdateScores(nn.Module):
    """Metrics over the updates of one RL step; their sums cover all processes.

    Losses are means over rows in every update, and over updates. The children have the names under
    which they are logged.
    """

    def __init__(self, *, with_value: bool) -> None:
        """Sets up the metrics.

        Args:
            with_value: whether there is a value model.
        """
        super().__init__()
        self.loss, self.policy_loss = Quotient(), Quotient()
        if with_value:
            self.value_loss = Quotient()
            self.value_error, self.value_explained = ValueFit("error"), ValueFit("explained")

    def add_policy(self, loss: Tensor, policy_loss: Tensor, num_rows: float) -> None:
        """Adds a batch.

        Args:
            loss: scalar, the sum over rows that is trained on.
            policy_loss: scalar, its policy term.
            num_rows: rows that the weights of the sums stand for.
        """
        self.loss.update(loss, num_rows)
        self.policy_loss.update(policy_loss, num_rows)

    def add_values(
        self, loss: Tensor, num_rows: float, values: Tensor, returns: Tensor, counted: Tensor
    ) -> None:
        """Adds the values of a batch.

        Args:
            loss: scalar, the sum over rows.
            num_rows: rows that its weights stand for.
            values: ``(M,)`` floating point.
            returns: ``(M,)`` floating point.
            counted: ``(M,)`` bool, tokens with weight.
        """
        self.value_loss.update(loss, num_rows)
        self.value_error.update(values, returns, counted)
        self.value_explained.update(values, returns, counted)
