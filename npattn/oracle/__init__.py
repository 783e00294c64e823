"""The exact value and derivatives of a call: each chooses an engine and conventions."""
