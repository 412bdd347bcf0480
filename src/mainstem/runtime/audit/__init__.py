"""Audits of the cache while it serves: what was hit is computed again, and compared bit for bit."""
