"""Answers that a server keeps: responses, stored chats, and the tokens of what a client sends back."""
