"""The top floor: the command line, the demo, and one script a figure or table."""
