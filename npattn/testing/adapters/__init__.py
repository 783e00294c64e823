"""How an implementation is read and called: signatures, frameworks, layouts, gradients."""
