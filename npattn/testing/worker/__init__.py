"""Implementations in another process, which takes nothing with it when it ends."""
