"""Diagnosis of failures: their causes, when they pass, and conventions found by probing."""
