"""Files and batches, by OpenAI's API: requests that the server answers beside those that somebody waits for."""
