"""How good are the tests of an attention function? Put known mistakes in its place, and run them.

`terms` reads how the tests call the function, `stand_in` gives a mistake that signature (`call` and
`tensors` its results), `patch` puts it into the modules that use the function, `runs` runs the
tests, `witness` finds what shows a mistake that they miss, and `score` counts.
"""
