"""Claims about levels of memory, and about time against a bound."""
