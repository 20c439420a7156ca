"""Plans in the formats of other tools, and theirs as pins: said exactly, or refused with every reason."""
