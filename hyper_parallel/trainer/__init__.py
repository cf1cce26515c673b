"""Training jobs: options, data, the loop, local workers."""
