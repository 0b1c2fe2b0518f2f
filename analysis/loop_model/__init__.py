"""A model of one SM that takes compiled instructions, and of how blocks fill a card."""
