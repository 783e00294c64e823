"""Read and call an implementation: signature, framework, layout, gradients."""
