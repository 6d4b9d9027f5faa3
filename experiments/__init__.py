"""The top floor: the `fpdt` command and one script a figure or table. Nothing imports it."""
