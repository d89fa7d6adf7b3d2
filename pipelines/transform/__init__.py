"""The transformations of rows by rules: dropped, renamed, masked and computed columns, filters."""
