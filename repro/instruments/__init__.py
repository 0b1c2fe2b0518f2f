"""Instruments: seconds from device events, bytes from hardware counters, state of the card.

Each returns a value with its spread or raises one exception whose message is one line with the
cause, so that an experiment can record the failure as a row. None of them ever reports a zero for
something it could not measure.
"""
