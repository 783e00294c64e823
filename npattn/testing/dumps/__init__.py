"""Dumps: arrays that a call of a kernel left in files, read, judged and written."""
