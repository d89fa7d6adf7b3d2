"""Modules for spark-submit. No others are in this folder, because Python imports from the folder of a script first."""
