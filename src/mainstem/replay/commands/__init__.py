"""The commands `mainstem trace`, `mainstem replay` and `mainstem plan`: arguments and printing, nothing else."""
