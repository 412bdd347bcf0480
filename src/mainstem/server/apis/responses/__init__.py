"""/v1/responses, by the OpenAI API reference."""
