"""Power of the judge: what it finds, how often it is wrong, and how tight the bounds are."""
