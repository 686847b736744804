"""Small networks on a frozen backbone: projection, features and the acceptance policy."""
