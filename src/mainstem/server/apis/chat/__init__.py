"""/v1/chat/completions, by the OpenAI API reference."""
