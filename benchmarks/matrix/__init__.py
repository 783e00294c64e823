"""The matrix: every target against every rule, on as many processes or machines as there are."""
