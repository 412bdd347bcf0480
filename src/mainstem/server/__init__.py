"""The OpenAI-compatible HTTP server: protocol, metrics and the application."""
