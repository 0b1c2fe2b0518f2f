"""One module per figure or table: each reads the records and draws."""
