"""Modules for spark-submit, in a folder of their own: Python searches the folder of a script first at each import."""
