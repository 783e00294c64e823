"""Files of cheats and of honest implementations, each of which stands alone once it is written."""
