"""A function judged by another one: what may differ is measured on the other alone."""
