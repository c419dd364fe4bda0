"""What things are: ids, units, settings, errors. Pure: no I/O, no clock, no randomness."""
