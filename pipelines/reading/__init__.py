"""What a frame of the data source `cdc` is made of."""
