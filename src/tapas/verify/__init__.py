"""Is the parallel program the original model? Both are run and compared, and what is sent is counted."""
