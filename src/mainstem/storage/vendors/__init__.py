"""Back ends of stores that others make. Each is one file, and knows no other."""
