"""Claims about attention: bytes, memory, time and error."""
