"""Clients' hints of the future: advice, sessions, public prefixes, and the pages that are promoted for them."""
