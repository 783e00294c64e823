"""What a check found: outcomes, the report, and scripts that reproduce a failure."""
