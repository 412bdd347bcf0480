"""Tables and numbers of the documentation, from the recorded results."""
