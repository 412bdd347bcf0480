"""Access to a server: API keys, origins, tenants."""
