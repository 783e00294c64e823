"""Check of the gradients of any function: claimed slopes against differences of its values."""
