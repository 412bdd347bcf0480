"""Readers: open the traces that others recorded. Each format is a row of `formats.FORMATS`."""
