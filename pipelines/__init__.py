"""Programs that read the change log: they apply it to sinks, verify and rebuild targets, and compact the log."""
