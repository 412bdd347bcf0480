"""Who may use a server: API keys, origins, tenants."""
