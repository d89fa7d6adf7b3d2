"""Dead letters: parks the rows that a target refuses, with their keys, and merges them later."""
