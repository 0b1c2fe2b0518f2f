"""Claims about options of attention, and about decoding."""
