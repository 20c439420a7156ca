"""The graph of a model: tensors, operators, repeated blocks, and the interpreter that runs it as it is."""
