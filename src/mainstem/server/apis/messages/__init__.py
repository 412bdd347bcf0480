"""/v1/messages, by Anthropic's API reference."""
