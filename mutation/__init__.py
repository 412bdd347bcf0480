"""Mutants from a machine: operators change a sample of all source lines, and the tests must see it.

    python_operators   what is changed in a line of Python: cosmic-ray's operators and ours
    native_operators   the same for the core, over tree-sitter's tree
    sample             the lines of a round, drawn from a seed, and their mutants
    copies             copies of the package and the repository, and how they are run; the core, compiled file by file
    forks              a process that has imported what tests need of others, and forks for each run of tests
    runner             drives such a process: what has failed, hung or died
    reach              which tests and which profiles of the simulator reach which lines, recorded
    rounds             each mutant against what reaches it, the wider choice and the simulator; goes on where it ended
    record             the record of a round, what is judged equivalent, and the table of docs/reliability.md

`simulator.mutants` makes bugs again that were written by hand; it runs them in the same copies.
"""
