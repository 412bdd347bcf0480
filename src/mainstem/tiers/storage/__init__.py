"""The storage tier: names, codecs and seals of stored pages, and the store that no caller waits for."""
