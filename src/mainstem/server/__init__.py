"""The OpenAI-compatible HTTP server: protocol, prompts, metrics and the application."""
