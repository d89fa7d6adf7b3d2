"""The change log: two Delta tables under one root, one writer each."""
