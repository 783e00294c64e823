"""The judge judged: mutants that it must find, and correct implementations that it must pass."""
