"""Results of a check: outcomes, the report, and scripts that reproduce a failure."""
