"""Where models come from on the command line: presets, transformers types, config files, Python files."""
