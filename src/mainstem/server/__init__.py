"""The OpenAI-compatible HTTP server: requests, replies, metrics and the application."""
