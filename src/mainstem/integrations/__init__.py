"""Mainstem inside the engines that people run: one module for each. None is imported before it is used."""
